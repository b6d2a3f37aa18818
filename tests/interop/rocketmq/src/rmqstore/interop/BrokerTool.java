package rmqstore.interop;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Map;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;

/**
 * A real broker on a store directory, driven by JSON lines on standard input and answering on standard output. Each
 * request is answered by any number of lines and then `done`, or `error` with the reason. At the end of the input the
 * process ends at once, as a killed one: no broker outlives the test that started it. README.md lists the requests.
 */
public final class BrokerTool {
    private static final String USAGE = "usage: BrokerTool DIR [options]";
    private static final long DEFAULT_TIMEOUT_MS = 60_000;

    private final StoreTool.Output out = new StoreTool.Output();
    private PeerBroker broker;
    private BrokerClients clients;

    private BrokerTool() {
    }

    public static void main(String[] args) {
        BrokerTool tool = new BrokerTool();
        // Libraries may print; only answers may reach standard output.
        System.setOut(System.err);
        int status = 1;
        try {
            StoreOptions options = new StoreOptions(Arrays.asList(args));
            if (options.kill || !options.arguments.isEmpty() || !options.batchTopics.isEmpty()) {
                throw new StoreOptions.UsageException("the broker takes DIR and store options only");
            }
            tool.broker = PeerBroker.start(options);
            tool.clients = new BrokerClients(tool.broker, tool.out);
            tool.out.print(tool.clients.state());
            tool.done();
            status = tool.serve() ? 0 : 3;
        } catch (StoreOptions.UsageException e) {
            System.err.println(e.getMessage() + "\n" + USAGE);
            status = 2;
        } catch (Throwable e) {
            e.printStackTrace();
            tool.error(e);
        }
        // The broker leaves threads behind, and an exit would run its shutdown once more.
        tool.out.flush();
        Runtime.getRuntime().halt(status);
    }

    /** Answers requests until `shutdown`; false when the input ended before. */
    private boolean serve() throws Exception {
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String text = requests.readLine(); text != null; text = requests.readLine()) {
            JSONObject request = JSON.parseObject(text);
            if (request.getString("op").equals("shutdown")) {
                clients.close();
                broker.close();
                done();
                return true;
            }
            try {
                answer(request);
                done();
            } catch (Exception e) {
                e.printStackTrace();
                error(e);
            }
        }
        return false;
    }

    private void answer(JSONObject request) throws Exception {
        Long timeout = request.getLong("timeoutMs");
        long deadline = System.nanoTime() + (timeout == null ? DEFAULT_TIMEOUT_MS : timeout) * 1_000_000;
        switch (request.getString("op")) {
            case "topic" -> clients.createTopic(request, deadline);
            case "produce" -> clients.produce(request);
            case "consume" -> clients.consume(request, deadline);
            case "query" -> clients.query(request);
            case "offsets" -> clients.offsets(request);
            case "persist" -> broker.controller.getConsumerOffsetManager().persist();
            case "dispatched" -> {
                broker.awaitDispatch();
                out.print(clients.state());
            }
            default -> throw new IllegalArgumentException("unknown op in " + request);
        }
    }

    private void done() {
        out.print(StoreTool.line("done"));
        out.flush();
    }

    private void error(Throwable e) {
        Map<String, Object> line = StoreTool.line("error");
        line.put("message", e.toString());
        out.print(line);
        out.flush();
    }
}
