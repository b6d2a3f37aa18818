package rmqstore.interop;

import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;

import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.AppendMessageResult;
import org.apache.rocketmq.store.PutMessageResult;

/**
 * Puts the messages of a script through DefaultMessageStore and prints what the store answered to each. A line
 * {"op": "dump"} between them prints all that the store holds at that point.
 */
final class StoreWriter {
    private static final Set<String> FIELDS = Set.of("topic", "queueId", "body", "properties", "flag", "sysFlag",
        "bornTimestamp", "storeTimestamp", "bornHost", "storeHost", "reconsumeTimes", "preparedTransactionOffset",
        "batch");
    private static final Set<String> BATCH_FIELDS = Set.of("body", "properties", "flag");

    private final PeerStore store;
    private final StoreTool tool;

    StoreWriter(PeerStore store, StoreTool tool) {
        this.store = store;
        this.tool = tool;
    }

    void run(List<JSONObject> script) throws Exception {
        for (JSONObject line : script) {
            if ("dump".equals(line.getString("op"))) {
                store.awaitDispatch();
                new StoreDump(store, tool).run();
                continue;
            }
            refuseUnknown(line, FIELDS);
            store.stopClock(line.getLong("storeTimestamp"));
            PutMessageResult result;
            if (line.containsKey("batch")) {
                MessageExtBatch batch = new MessageExtBatch();
                fill(batch, line);
                batch.setBody(MessageDecoder.encodeMessages(batchMessages(line.getJSONArray("batch"))));
                result = store.putMessages(batch);
            } else {
                MessageExtBrokerInner message = new MessageExtBrokerInner();
                fill(message, line);
                message.setBody(body(line));
                MessageAccessor.setProperties(message, properties(line));
                message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
                result = store.putMessage(message);
            }
            print(result);
        }
        store.stopClock(null);
        store.awaitDispatch();
    }

    private void print(PutMessageResult result) {
        Map<String, Object> line = StoreTool.line("put");
        line.put("status", result.getPutMessageStatus().toString());
        AppendMessageResult append = result.getAppendMessageResult();
        if (append != null) {
            line.put("appendStatus", append.getStatus().toString());
            line.put("offset", append.getWroteOffset());
            line.put("size", append.getWroteBytes());
            line.put("queueOffset", append.getLogicsOffset());
            line.put("store", append.getStoreTimestamp());
            line.put("count", append.getMsgNum());
            line.put("msgId", append.getMsgId());
        }
        tool.print(line);
    }

    private static void fill(MessageExtBrokerInner message, JSONObject line) throws Exception {
        message.setTopic(required(line, "topic"));
        message.setQueueId(line.getIntValue("queueId"));
        message.setFlag(line.getIntValue("flag"));
        message.setSysFlag(line.getIntValue("sysFlag"));
        Long born = line.getLong("bornTimestamp");
        message.setBornTimestamp(born == null ? System.currentTimeMillis() : born);
        message.setBornHost(host(line, "bornHost", "127.0.0.1:0"));
        message.setStoreHost(host(line, "storeHost", "127.0.0.1:10911"));
        // The broker, not the store, marks the born host; the store marks only its own.
        if (message.getBornHost() instanceof InetSocketAddress born6
            && born6.getAddress().getAddress().length == 16) {
            message.setBornHostV6Flag();
        }
        message.setReconsumeTimes(line.getIntValue("reconsumeTimes"));
        message.setPreparedTransactionOffset(line.getLongValue("preparedTransactionOffset"));
    }

    private static List<Message> batchMessages(JSONArray lines) {
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < lines.size(); i++) {
            JSONObject line = lines.getJSONObject(i);
            refuseUnknown(line, BATCH_FIELDS);
            Message message = new Message();
            message.setFlag(line.getIntValue("flag"));
            message.setBody(body(line));
            MessageAccessor.setProperties(message, properties(line));
            messages.add(message);
        }
        return messages;
    }

    static void refuseUnknown(JSONObject line, Set<String> known) {
        for (String name : line.keySet()) {
            if (!known.contains(name)) {
                throw new IllegalArgumentException("unknown field " + name + " in " + line);
            }
        }
    }

    private static String required(JSONObject line, String name) {
        String value = line.getString(name);
        if (value == null) {
            throw new IllegalArgumentException(name + " is missing in " + line);
        }
        return value;
    }

    static byte[] body(JSONObject line) {
        String body = line.getString("body");
        return body == null ? new byte[0] : Base64.getDecoder().decode(body);
    }

    /** Properties in the order of the script: a list of pairs, or an object. */
    static Map<String, String> properties(JSONObject line) {
        Map<String, String> properties = new LinkedHashMap<>();
        Object value = line.get("properties");
        if (value instanceof JSONArray pairs) {
            for (int i = 0; i < pairs.size(); i++) {
                properties.put(pairs.getJSONArray(i).getString(0), pairs.getJSONArray(i).getString(1));
            }
        } else if (value instanceof JSONObject object) {
            object.keySet().forEach(name -> properties.put(name, object.getString(name)));
        } else if (value != null) {
            throw new IllegalArgumentException("properties must be a list of pairs or an object in " + line);
        }
        return properties;
    }

    /** "ip:port" or "[v6]:port"; never a name, so that nothing is looked up. */
    private static InetSocketAddress host(JSONObject line, String name, String otherwise) throws Exception {
        String text = line.getString(name) == null ? otherwise : line.getString(name);
        int colon = text.lastIndexOf(':');
        String ip = colon < 0 ? "" : text.substring(0, colon);
        if (!ip.matches("[0-9.]+|\\[[0-9a-fA-F:.]+\\]")) {
            throw new IllegalArgumentException(name + " must be ip:port, got " + text);
        }
        return new InetSocketAddress(InetAddress.getByName(ip), Integer.parseInt(text.substring(colon + 1)));
    }
}
