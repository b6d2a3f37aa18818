package rmqstore.interop;

import java.io.BufferedOutputStream;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.StringReader;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import com.alibaba.fastjson2.JSONWriter;

import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Reads and writes a store directory with the published RocketMQ store: one command, JSON lines on standard output.
 * It asks the store's own classes for everything and decodes no file by itself. README.md lists the commands.
 */
public final class StoreTool {
    private static final String USAGE = "usage: StoreTool dump|write|query|get|time DIR [options] [arguments], or StoreTool serve";

    private final Output out = new Output();
    /** The script of the command, when commands come on standard input; null otherwise. */
    private String script;

    private StoreTool() {
    }

    public static void main(String[] args) throws Exception {
        boolean serve = args.length == 1 && args[0].equals("serve");
        if (args.length < 2 && !serve) {
            System.err.println(USAGE);
            System.exit(2);
        }
        StoreTool tool = new StoreTool();
        // Libraries may print; only answers may reach standard output.
        System.setOut(System.err);
        try {
            if (serve) {
                tool.serve();
            } else {
                tool.run(Arrays.asList(args));
            }
            tool.halt(0);
        } catch (StoreOptions.UsageException e) {
            System.err.println(e.getMessage() + "\n" + USAGE);
            tool.halt(2);
        } catch (Throwable e) {
            e.printStackTrace();
            tool.halt(1);
        }
    }

    /**
     * Runs commands that come on standard input, one after the other, each on a store of its own: a line
     * {"words": [COMMAND, DIR, ...], "lines": N} and N lines of script. After its answers comes `done`. A command that
     * fails ends the process, as does `--kill`: whatever a store left behind is gone with it.
     */
    private void serve() throws Exception {
        BufferedReader input = standardInput();
        for (String text = input.readLine(); text != null; text = input.readLine()) {
            JSONObject command = JSON.parseObject(text);
            StringBuilder lines = new StringBuilder();
            for (int i = command.getIntValue("lines"); i > 0; i--) {
                lines.append(input.readLine()).append('\n');
            }
            script = lines.toString();
            run(command.getList("words", String.class));
            print(line("done"));
            out.flush();
        }
    }

    private void run(List<String> words) throws Exception {
        StoreOptions options = new StoreOptions(words.subList(1, words.size()));
        if (!options.brokerSettings.isEmpty()) {
            throw new StoreOptions.UsageException("--broker-set is an option of BrokerTool");
        }
        run(words.get(0), options);
    }

    private void run(String command, StoreOptions options) throws Exception {
        List<JSONObject> requests = requests(command, options.arguments);
        PeerStore store = PeerStore.open(options);
        switch (command) {
            case "dump" -> new StoreDump(store, this).run();
            case "write" -> new StoreWriter(store, this).run(requests);
            default -> new StoreQuestions(store, this).run(requests);
        }
        if (options.kill) {
            store.flush();
            if (script != null) {
                print(line("done"));
            }
            // Nothing is shut down.
            halt(0);
        }
        store.close();
    }

    /** Everything that the command is asked to do, read before the store is touched. */
    private List<JSONObject> requests(String command, List<String> arguments) throws Exception {
        List<JSONObject> requests = new ArrayList<>();
        switch (command) {
            case "dump" -> {
                if (!arguments.isEmpty()) {
                    throw new StoreOptions.UsageException("dump takes no arguments, got " + arguments);
                }
            }
            case "write" -> {
                if (arguments.size() != 1) {
                    throw new StoreOptions.UsageException("write takes one script (or - for standard input)");
                }
                readLines(arguments.get(0), null, requests);
            }
            case "query", "get", "time" -> {
                if (arguments.isEmpty()) {
                    readLines("-", command, requests);
                } else {
                    requests.add(StoreQuestions.fromArguments(command, arguments));
                }
            }
            default -> throw new StoreOptions.UsageException("unknown command " + command);
        }
        return requests;
    }

    private static BufferedReader standardInput() {
        return new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    }

    private BufferedReader open(String path) throws Exception {
        if (!path.equals("-")) {
            return Files.newBufferedReader(Path.of(path), StandardCharsets.UTF_8);
        }
        return script == null ? standardInput() : new BufferedReader(new StringReader(script));
    }

    private void readLines(String path, String op, List<JSONObject> requests) throws Exception {
        try (BufferedReader reader = open(path)) {
            int number = 0;
            for (String line = reader.readLine(); line != null; line = reader.readLine()) {
                number++;
                if (line.isBlank()) {
                    continue;
                }
                JSONObject request;
                try {
                    request = JSON.parseObject(line);
                } catch (RuntimeException e) {
                    throw new IllegalArgumentException(path + ", line " + number + ": not a JSON object", e);
                }
                if (op != null) {
                    request.putIfAbsent("op", op);
                }
                requests.add(request);
            }
        }
    }

    void print(Map<String, Object> line) {
        out.print(line);
    }

    /** Ends the process as a kill does: no shutdown, no shutdown hook; only the answers are written out first. */
    private void halt(int status) {
        out.flush();
        Runtime.getRuntime().halt(status);
    }

    /** Standard output, to which nobody else writes: one JSON object a line. */
    static final class Output {
        private final PrintStream stream = new PrintStream(
            new BufferedOutputStream(new FileOutputStream(FileDescriptor.out), 1 << 16), false, StandardCharsets.UTF_8);

        synchronized void print(Map<String, Object> line) {
            // A null is an answer, too: the record is not there, the store gave no result.
            stream.println(JSON.toJSONString(line, JSONWriter.Feature.WriteNulls));
        }

        synchronized void flush() {
            stream.flush();
        }
    }

    static Map<String, Object> line(String type) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("type", type);
        return line;
    }

    /** A record as the store decoded it. */
    static Map<String, Object> message(String type, MessageExt message) {
        Map<String, Object> line = line(type);
        byte[] body = message.getBody() == null ? new byte[0] : message.getBody();
        line.put("offset", message.getCommitLogOffset());
        line.put("size", message.getStoreSize());
        line.put("topic", message.getTopic());
        line.put("queueId", message.getQueueId());
        line.put("queueOffset", message.getQueueOffset());
        line.put("flag", message.getFlag());
        line.put("sysFlag", message.getSysFlag());
        line.put("born", message.getBornTimestamp());
        line.put("store", message.getStoreTimestamp());
        line.put("bornHost", message.getBornHost().toString());
        line.put("storeHost", message.getStoreHost().toString());
        line.put("reconsume", message.getReconsumeTimes());
        line.put("prepared", message.getPreparedTransactionOffset());
        line.put("crc", message.getBodyCRC());
        line.put("bodyLen", body.length);
        line.put("bodyCrc", UtilAll.crc32(body));
        line.put("msgId", message.getMsgId());
        if (message.getProperties() != null && !message.getProperties().isEmpty()) {
            line.put("props", new TreeMap<>(message.getProperties()));
        }
        return line;
    }

    /** The position in the log that a raw record states about itself. */
    static long phyOffset(ByteBuffer record) {
        return record.getLong(record.position() + 28);
    }
}
