package rmqstore.interop;

import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;

import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.ResponseCode;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Real clients of the broker: each speaks to it through the network and the name server, as an application does. Only
 * to see that a one-way commit has arrived, and where a queue ends, does it look into the broker itself.
 */
final class BrokerClients {
    private static final Set<String> FIELDS =
        Set.of("topic", "queueId", "body", "keys", "tags", "flag", "properties", "delayLevel", "batch");
    private static final Set<String> BATCH_FIELDS = Set.of("body", "keys", "tags", "flag", "properties");

    private final PeerBroker broker;
    private final StoreTool.Output out;
    private DefaultMQProducer producer;
    private DefaultMQAdminExt admin;
    private int instances;

    BrokerClients(PeerBroker broker, StoreTool.Output out) {
        this.broker = broker;
        this.out = out;
    }

    private <T extends ClientConfig> T connect(T client) {
        client.setNamesrvAddr(broker.nameServerAddress());
        client.setClientIP("127.0.0.1");
        // Clients of one name would share their connection and their heartbeat.
        client.setInstanceName("peer-" + ++instances);
        client.setVipChannelEnabled(false);
        return client;
    }

    private DefaultMQAdminExt admin() throws MQClientException {
        if (admin == null) {
            DefaultMQAdminExt client = connect(new DefaultMQAdminExt(30_000));
            client.start();
            admin = client;
        }
        return admin;
    }

    private DefaultMQProducer producer() throws MQClientException {
        if (producer == null) {
            DefaultMQProducer client = connect(new DefaultMQProducer("peer-producer"));
            // A send that is repeated may store its message twice.
            client.setRetryTimesWhenSendFailed(0);
            client.setSendMsgTimeout(60_000);
            // Test bodies stay as they are given, whatever their size.
            client.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
            client.start();
            producer = client;
        }
        return producer;
    }

    void createTopic(JSONObject request, long deadline) throws Exception {
        String topic = StoreQuestions.required(request, "topic", String.class);
        int queues = StoreQuestions.required(request, "queues", Integer.class);
        admin().createAndUpdateTopicConfig(broker.brokerAddress(), new TopicConfig(topic, queues, queues));
        awaitRoute(topic, queues, deadline);
    }

    /**
     * Waits until the name server leads to the topic. The broker tells it in time, but a client that asked too early
     * would ask again only after half a minute.
     */
    private void awaitRoute(String topic, int queues, long deadline) throws Exception {
        while (true) {
            try {
                if (producer().fetchPublishMessageQueues(topic).size() == queues) {
                    return;
                }
            } catch (MQClientException e) {
                if (System.nanoTime() > deadline) {
                    throw e;
                }
            }
            broker.controller.registerBrokerAll(true, false, true);
            pause(deadline, "the name server does not know " + queues + " queues of topic " + topic);
        }
    }

    /** Sends message by message; each answer goes out before the next message is sent. */
    void produce(JSONObject request) throws Exception {
        JSONArray messages = StoreQuestions.required(request, "messages", JSONArray.class);
        for (int i = 0; i < messages.size(); i++) {
            JSONObject line = messages.getJSONObject(i);
            StoreWriter.refuseUnknown(line, FIELDS);
            String topic = StoreQuestions.required(line, "topic", String.class);
            MessageQueue queue = new MessageQueue(topic, PeerBroker.NAME,
                StoreQuestions.required(line, "queueId", Integer.class));
            SendResult result;
            if (line.containsKey("batch")) {
                List<Message> batch = new ArrayList<>();
                JSONArray inner = line.getJSONArray("batch");
                for (int j = 0; j < inner.size(); j++) {
                    StoreWriter.refuseUnknown(inner.getJSONObject(j), BATCH_FIELDS);
                    batch.add(message(topic, inner.getJSONObject(j)));
                }
                result = producer().send(batch, queue);
            } else {
                result = producer().send(message(topic, line), queue);
            }
            Map<String, Object> answer = StoreTool.line("put");
            answer.put("status", result.getSendStatus().toString());
            answer.put("msgId", result.getMsgId());
            answer.put("offsetMsgId", result.getOffsetMsgId());
            answer.put("queueId", result.getMessageQueue().getQueueId());
            answer.put("queueOffset", result.getQueueOffset());
            // An offset message id ends in the place in the log, 16 hexadecimal digits; a batch has one a message.
            List<Long> offsets = new ArrayList<>();
            for (String id : result.getOffsetMsgId().split(",")) {
                offsets.add(Long.parseLong(id.substring(id.length() - 16), 16));
            }
            answer.put("offsets", offsets);
            out.print(answer);
            // Acknowledged now: the caller may kill this process and expect the message to be there.
            out.flush();
        }
    }

    private static Message message(String topic, JSONObject line) {
        Message message = new Message(topic, StoreWriter.body(line));
        StoreWriter.properties(line).forEach((name, value) -> MessageAccessor.putProperty(message, name, value));
        if (line.getString("keys") != null) {
            message.setKeys(line.getString("keys"));
        }
        if (line.getString("tags") != null) {
            message.setTags(line.getString("tags"));
        }
        message.setFlag(line.getIntValue("flag"));
        if (line.getIntValue("delayLevel") > 0) {
            message.setDelayTimeLevel(line.getIntValue("delayLevel"));
        }
        return message;
    }

    /**
     * One consumer of a group takes from every queue of a topic, from the group's committed offset on: `count` messages,
     * or all that there are; then it commits and leaves.
     */
    void consume(JSONObject request, long deadline) throws Exception {
        String group = StoreQuestions.required(request, "group", String.class);
        String topic = StoreQuestions.required(request, "topic", String.class);
        String sub = request.getString("sub");
        Integer count = request.getInteger("count");
        if (sub != null && count == null) {
            throw new IllegalArgumentException("with a subscription give a count: where the rest is filtered out no "
                + "message tells that the end is reached");
        }
        awaitRoute(topic, queues(topic), deadline);
        DefaultLitePullConsumer consumer = connect(new DefaultLitePullConsumer(group));
        consumer.setAutoCommit(false);
        // For a queue without committed offset.
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, sub == null ? "*" : sub);
        Map<MessageQueue, Long> next = new HashMap<>();
        consumer.start();
        try {
            int taken = 0;
            while (count == null ? !atEnd(group, topic, next) : taken < count) {
                for (MessageExt message : consumer.poll(100)) {
                    if (count != null && taken == count) {
                        // Not taken, hence not committed: it comes again.
                        break;
                    }
                    taken++;
                    MessageQueue queue = new MessageQueue(topic, PeerBroker.NAME, message.getQueueId());
                    next.put(queue, message.getQueueOffset() + 1);
                    print(message);
                }
                if (System.nanoTime() > deadline) {
                    throw new IllegalStateException("only " + taken + " messages came of topic " + topic + " for group "
                        + group + ", next offsets " + next);
                }
            }
            if (count != null && request.getBooleanValue("more")) {
                // Whatever comes beyond is reported, so that a test may see that there is nothing.
                for (MessageExt message : consumer.poll(500)) {
                    print(message);
                }
            }
            if (!next.isEmpty()) {
                consumer.commit(next, true);
                for (Map.Entry<MessageQueue, Long> entry : next.entrySet()) {
                    while (committed(group, topic, entry.getKey().getQueueId()) != entry.getValue()) {
                        pause(deadline, "the commit of " + entry + " by group " + group + " does not arrive");
                    }
                }
            }
        } finally {
            consumer.shutdown();
        }
    }

    private long committed(String group, String topic, int queueId) {
        return broker.controller.getConsumerOffsetManager().queryOffset(group, topic, queueId);
    }

    private int queues(String topic) {
        TopicConfig config = broker.controller.getTopicConfigManager().selectTopicConfig(topic);
        if (config == null) {
            throw new IllegalArgumentException("the broker does not know topic " + topic);
        }
        return config.getReadQueueNums();
    }

    private boolean atEnd(String group, String topic, Map<MessageQueue, Long> next) throws Exception {
        for (int queueId = 0; queueId < queues(topic); queueId++) {
            long reached = Math.max(committed(group, topic, queueId), broker.store().getMinOffsetInQueue(topic, queueId));
            Long seen = next.get(new MessageQueue(topic, PeerBroker.NAME, queueId));
            if ((seen == null ? reached : seen) < broker.store().getMaxOffsetInQueue(topic, queueId)) {
                return false;
            }
        }
        return true;
    }

    private void print(MessageExt message) {
        Map<String, Object> line = StoreTool.message("message", message);
        byte[] body = message.getBody() == null ? new byte[0] : message.getBody();
        line.put("body", Base64.getEncoder().encodeToString(body));
        out.print(line);
    }

    /** Messages by key; the client drops those that only share the key's hash. No message is an empty answer. */
    void query(JSONObject request) throws Exception {
        String topic = StoreQuestions.required(request, "topic", String.class);
        String key = StoreQuestions.required(request, "key", String.class);
        int maxNum = StoreQuestions.required(request, "maxNum", Integer.class);
        long begin = StoreQuestions.required(request, "begin", Long.class);
        long end = StoreQuestions.required(request, "end", Long.class);
        QueryResult result;
        try {
            result = request.getBooleanValue("unique")
                ? admin().queryMessageByUniqKey(PeerBroker.CLUSTER, topic, key, maxNum, begin, end)
                : admin().queryMessage(topic, key, maxNum, begin, end);
        } catch (MQClientException e) {
            if (e.getResponseCode() == ResponseCode.NO_MESSAGE) {
                return;
            }
            throw e;
        }
        for (MessageExt message : result.getMessageList()) {
            print(message);
        }
    }

    /** Committed offsets of a group as the broker has them, by topic and queue. */
    void offsets(JSONObject request) {
        String group = StoreQuestions.required(request, "group", String.class);
        Map<String, Map<Integer, Long>> topics = new TreeMap<>();
        broker.controller.getConsumerOffsetManager().getOffsetTable().forEach((name, queues) -> {
            String[] parts = name.split("@");
            if (parts.length == 2 && parts[1].equals(group)) {
                topics.put(parts[0], new TreeMap<>(queues));
            }
        });
        topics.forEach((topic, queues) -> queues.forEach((queueId, offset) -> {
            Map<String, Object> line = StoreTool.line("offset");
            line.put("topic", topic);
            line.put("queueId", queueId);
            line.put("offset", offset);
            out.print(line);
        }));
    }

    void close() {
        if (producer != null) {
            producer.shutdown();
        }
        if (admin != null) {
            admin.shutdown();
        }
    }

    private static void pause(long deadline, String otherwise) throws InterruptedException {
        if (System.nanoTime() > deadline) {
            throw new IllegalStateException(otherwise);
        }
        Thread.sleep(20);
    }

    /** Facts of the running broker: where the log ends, and its addresses. */
    Map<String, Object> state() {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("type", "state");
        line.put("minPhy", broker.store().getMinPhyOffset());
        line.put("maxPhy", broker.store().getMaxPhyOffset());
        line.put("nameServer", broker.nameServerAddress());
        line.put("broker", broker.brokerAddress());
        return line;
    }
}
