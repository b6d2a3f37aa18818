package rmqstore.interop;

import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
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
    private static final String USAGE = "usage: StoreTool dump|write|query|get|time DIR [options] [arguments]";

    private final PrintStream out =
        new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);

    private StoreTool() {
    }

    public static void main(String[] args) throws Exception {
        if (args.length < 2) {
            System.err.println(USAGE);
            System.exit(2);
        }
        StoreTool tool = new StoreTool();
        // Libraries may print; only answers may reach standard output.
        System.setOut(System.err);
        try {
            StoreOptions options = new StoreOptions(Arrays.asList(args).subList(1, args.length));
            tool.run(args[0], options);
        } catch (StoreOptions.UsageException e) {
            System.err.println(e.getMessage() + "\n" + USAGE);
            tool.halt(2);
        } catch (Throwable e) {
            e.printStackTrace();
            tool.halt(1);
        }
        // The store leaves threads behind that would keep the process alive.
        System.exit(0);
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
            halt(0);
        }
        store.close();
        out.flush();
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

    private static void readLines(String path, String op, List<JSONObject> requests) throws Exception {
        try (BufferedReader reader = path.equals("-")
            ? new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))
            : Files.newBufferedReader(Path.of(path), StandardCharsets.UTF_8)) {
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
        // A null is an answer, too: the record is not there, the store gave no result.
        out.println(JSON.toJSONString(line, JSONWriter.Feature.WriteNulls));
    }

    /** Ends the process as a kill does: no shutdown, no shutdown hook; only the answers are written out first. */
    private void halt(int status) {
        out.flush();
        Runtime.getRuntime().halt(status);
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
