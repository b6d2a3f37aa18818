package rmqstore.interop;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

import com.alibaba.fastjson2.JSONObject;

import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.filter.FilterAPI;
import org.apache.rocketmq.store.DefaultMessageFilter;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.MessageFilter;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.index.QueryOffsetResult;

/** Answers single questions about the store: by key, by queue offset, by time, by position in the log. */
final class StoreQuestions {
    private static final String GROUP = "peer";
    private static final Set<String> TEXTS = Set.of("topic", "key", "indexType", "sub", "boundary");

    private final PeerStore store;
    private final StoreTool tool;

    StoreQuestions(PeerStore store, StoreTool tool) {
        this.store = store;
        this.tool = tool;
    }

    /** One question from the command line, in the form that standard input has. */
    static JSONObject fromArguments(String command, List<String> arguments) {
        List<String> names = switch (command) {
            case "query" -> List.of("topic", "key", "maxNum", "begin", "end", "indexType");
            case "get" -> List.of("topic", "queueId", "offset", "maxNum", "maxBytes", "sub");
            default -> List.of("topic", "queueId", "timestamp", "boundary");
        };
        int required = command.equals("query") ? names.size() - 1 : names.size();
        if (arguments.size() < required || arguments.size() > names.size()) {
            throw new StoreOptions.UsageException(command + " takes " + names + ", got " + arguments);
        }
        JSONObject request = new JSONObject();
        request.put("op", command);
        for (int i = 0; i < arguments.size(); i++) {
            String value = arguments.get(i);
            if (!value.equals("-")) {
                request.put(names.get(i), TEXTS.contains(names.get(i)) ? value : (Object) number(names.get(i), value));
            }
        }
        return request;
    }

    private static Long number(String name, String text) {
        try {
            return Long.valueOf(text);
        } catch (NumberFormatException e) {
            throw new StoreOptions.UsageException(name + " must be a number, got " + text);
        }
    }

    void run(List<JSONObject> requests) throws Exception {
        for (JSONObject request : requests) {
            String op = request.getString("op");
            Map<String, Object> line = StoreTool.line(op);
            request.forEach((name, value) -> {
                if (!name.equals("op")) {
                    line.put(name, value);
                }
            });
            switch (op) {
                case "query" -> query(request, line);
                case "get" -> get(request, line);
                case "time" -> time(request, line);
                case "look" -> look(request, line);
                default -> throw new IllegalArgumentException("unknown op in " + request);
            }
            tool.print(line);
        }
    }

    static <T> T required(JSONObject request, String name, Class<T> kind) {
        T value = request.getObject(name, kind);
        if (value == null) {
            throw new IllegalArgumentException(name + " is missing in " + request);
        }
        return value;
    }

    private void query(JSONObject request, Map<String, Object> line) {
        String topic = required(request, "topic", String.class);
        String key = required(request, "key", String.class);
        int maxNum = required(request, "maxNum", Integer.class);
        long begin = required(request, "begin", Long.class);
        long end = required(request, "end", Long.class);
        String indexType = request.getString("indexType");
        QueryOffsetResult index = store.indexService().queryOffset(topic, key, maxNum, begin, end, indexType);
        line.put("offsets", index.getPhyOffsets());
        line.put("indexLastUpdateTimestamp", index.getIndexLastUpdateTimestamp());
        line.put("indexLastUpdatePhyOffset", index.getIndexLastUpdatePhyoffset());
        QueryMessageResult result = indexType == null ? store.queryMessage(topic, key, maxNum, begin, end)
            : store.queryMessage(topic, key, maxNum, begin, end, indexType, null);
        try {
            List<Long> messages = new ArrayList<>();
            for (ByteBuffer record : result.getMessageBufferList()) {
                messages.add(StoreTool.phyOffset(record));
            }
            line.put("messages", messages);
        } finally {
            result.release();
        }
    }

    private void get(JSONObject request, Map<String, Object> line) throws Exception {
        String topic = required(request, "topic", String.class);
        String sub = request.getString("sub");
        MessageFilter filter = sub == null ? null
            : new DefaultMessageFilter(FilterAPI.buildSubscriptionData(topic, sub));
        GetMessageResult result = store.getMessage(GROUP, topic, required(request, "queueId", Integer.class),
            required(request, "offset", Long.class), required(request, "maxNum", Integer.class),
            required(request, "maxBytes", Integer.class), filter);
        if (result == null) {
            line.put("status", null);
            return;
        }
        try {
            line.put("status", result.getStatus().toString());
            line.put("next", result.getNextBeginOffset());
            line.put("min", result.getMinOffset());
            line.put("max", result.getMaxOffset());
            line.put("count", result.getMessageCount());
            line.put("bytes", result.getBufferTotalSize());
            List<Map<String, Object>> records = new ArrayList<>();
            for (int i = 0; i < result.getMessageBufferList().size(); i++) {
                ByteBuffer buffer = result.getMessageBufferList().get(i);
                Map<String, Object> record = new LinkedHashMap<>();
                record.put("queueOffset", result.getMessageQueueOffset().get(i));
                record.put("offset", StoreTool.phyOffset(buffer));
                record.put("size", buffer.remaining());
                records.add(record);
            }
            line.put("records", records);
        } finally {
            result.release();
        }
    }

    private void time(JSONObject request, Map<String, Object> line) {
        BoundaryType boundary = BoundaryType.valueOf(required(request, "boundary", String.class).toUpperCase());
        line.put("queueOffset", store.getOffsetInQueueByTime(required(request, "topic", String.class),
            required(request, "queueId", Integer.class), required(request, "timestamp", Long.class), boundary));
    }

    private void look(JSONObject request, Map<String, Object> line) {
        MessageExt message = store.lookMessageByOffset(required(request, "offset", Long.class));
        line.put("message", message == null ? null : StoreTool.message("msg", message));
    }
}
