package rmqstore.sample;

import java.io.File;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.atomic.AtomicInteger;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;

import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.impl.producer.TopicPublishInfo;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/**
 * Writes the sample store: a name server, a broker and its clients in one process send the messages of a script, one
 * after the other, each not before its time; three groups read them; the broker stops in order. Arguments: DIR SCRIPT
 * ANSWERS. The script is what messages.py writes; the answers are what the producers got acknowledged.
 */
public final class Sample {
    private static final String NAME = "golden";
    private static final String LOOPBACK = "127.0.0.1";
    /** It stands in the ids of messages, and so does the broker's address. */
    private static final int PORT = 20876;
    private static final int NAME_SERVER_PORT = 20875;
    private static final int REPLICATION_PORT = 20877;

    private final List<ClientConfig> clients = new ArrayList<>();
    private final BrokerController controller;
    private final DefaultMQProducer producer;
    private final TransactionMQProducer transactions;
    private final Map<String, DefaultMQProducer> packing = new LinkedHashMap<>();
    private final PrintStream answers;
    /** Groups that were started. */
    private final Set<String> groups = new HashSet<>();

    private Sample(BrokerController controller, PrintStream answers) throws Exception {
        this.controller = controller;
        this.answers = answers;
        producer = connect(new DefaultMQProducer("P-orders"));
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.setSendMsgTimeout(60_000);
        producer.start();
        transactions = connect(new TransactionMQProducer("P-tx"));
        transactions.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return (LocalTransactionState) argument;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.UNKNOW;
            }
        });
    }

    public static void main(String[] args) throws Exception {
        int status = 1;
        try (PrintStream answers = new PrintStream(args[2], StandardCharsets.UTF_8)) {
            run(args[0], Files.readAllLines(Path.of(args[1])), answers);
            status = 0;
        } catch (Throwable e) {
            e.printStackTrace();
        }
        // The name server and the clients leave threads behind, and an exit would run the broker's shutdown once more.
        Runtime.getRuntime().halt(status);
    }

    private static void run(String directory, List<String> script, PrintStream answers) throws Exception {
        String home = System.getProperty("user.home");
        NamesrvConfig names = new NamesrvConfig();
        names.setRocketmqHome(home);
        names.setKvConfigPath(home + File.separator + "kvConfig.json");
        NettyServerConfig server = new NettyServerConfig();
        server.setBindAddress(LOOPBACK);
        server.setListenPort(NAME_SERVER_PORT);
        NamesrvController nameServer = new NamesrvController(names, server);
        if (!nameServer.initialize()) {
            throw new IllegalStateException("NamesrvController.initialize() failed");
        }
        nameServer.start();
        BrokerController controller = load(directory);
        controller.start();
        Sample sample = new Sample(controller, answers);
        sample.topic("Orders", 4);
        sample.topic("Batches", 4);
        sample.topic("Documents", 4);
        sample.topic("Payments", 4);
        sample.topic("Reminders", 2);
        String longName = JSON.parseObject(script.stream().filter(line -> line.contains("\"Long_name")).findFirst()
            .orElseThrow()).getString("topic");
        sample.topic(longName, 4);
        sample.send(script);
        sample.consume();
        sample.awaitCheck();
        // A shutdown wakes the thread that asks; nothing is old enough for it then.
        controller.getBrokerConfig().setTransactionTimeOut(86_400_000);
        sample.close();
        controller.shutdown();
    }

    private static BrokerController load(String directory) throws Exception {
        Properties properties = new Properties();
        properties.setProperty("storePathRootDir", directory);
        properties.setProperty("storePathCommitLog", directory + File.separator + "commitlog");
        properties.setProperty("haListenPort", Integer.toString(REPLICATION_PORT));
        properties.setProperty("mappedFileSizeCommitLog", "1048576");
        properties.setProperty("mappedFileSizeConsumeQueue", "6000");
        properties.setProperty("maxHashSlotNum", "1000");
        properties.setProperty("maxIndexNum", "8000");
        properties.setProperty("messageDelayLevel", "1s 2s 30m 1h");
        properties.setProperty("timerPrecisionMs", "100");
        properties.setProperty("mappedFileSizeTimerLog", "1048576");
        properties.setProperty("diskMaxUsedSpaceRatio", "95");
        properties.setProperty("cleanFileForciblyEnable", "false");
        properties.setProperty("fileReservedTime", "1000000");
        MessageStoreConfig store = new MessageStoreConfig();
        MixAll.properties2Object(properties, store);

        BrokerConfig config = new BrokerConfig();
        config.setRocketmqHome(System.getProperty("user.home"));
        config.setBrokerName(NAME);
        config.setBrokerClusterName(NAME);
        config.setBrokerIP1(LOOPBACK);
        config.setBrokerIP2(LOOPBACK);
        config.setNamesrvAddr(LOOPBACK + ":" + NAME_SERVER_PORT);
        config.setBrokerFastFailureEnable(false);
        // What nobody settled is asked for once, while the program waits.
        config.setTransactionTimeOut(6_000);
        config.setTransactionCheckInterval(Long.getLong("sample.checkInterval", 30_000));
        NettyServerConfig server = new NettyServerConfig();
        server.setBindAddress(LOOPBACK);
        server.setListenPort(PORT);
        BrokerController controller = new BrokerController(config, server, new NettyClientConfig(), store);
        if (!controller.initialize()) {
            throw new IllegalStateException("BrokerController.initialize() refused " + directory);
        }
        return controller;
    }

    private <T extends ClientConfig> T connect(T client) {
        client.setNamesrvAddr(LOOPBACK + ":" + NAME_SERVER_PORT);
        client.setClientIP(LOOPBACK);
        client.setInstanceName("sample-" + clients.size());
        client.setVipChannelEnabled(false);
        clients.add(client);
        return client;
    }

    private void topic(String topic, int queues) throws Exception {
        controller.getTopicConfigManager().updateTopicConfig(new TopicConfig(topic, queues, queues, 6));
        for (int tries = 0; ; tries++) {
            controller.registerBrokerAll(true, false, true);
            try {
                if (producer.fetchPublishMessageQueues(topic).size() == queues) {
                    return;
                }
            } catch (MQClientException e) {
                if (tries == 100) {
                    throw e;
                }
            }
            Thread.sleep(100);
        }
    }

    // ------------------------------------------------------------------------------------------------------- the script

    private void send(List<String> script) throws Exception {
        for (String kind : Arrays.asList("LZ4", "ZSTD", "ZLIB")) {
            // A producer asks for this once, when it is made.
            System.setProperty("rocketmq.message.compressType", kind);
            DefaultMQProducer client = connect(new DefaultMQProducer("P-" + kind));
            client.setCompressMsgBodyOverHowmuch(100);
            client.start();
            client.fetchPublishMessageQueues("Documents");
            packing.put(kind, client);
        }
        transactions.start();
        // A producer learns a topic's queues when it first sends; here it must know them before.
        transactions.getDefaultMQProducerImpl().getTopicPublishInfoTable().put("Payments", new TopicPublishInfo());
        transactions.getDefaultMQProducerImpl().getMqClientFactory().updateTopicRouteInfoFromNameServer("Payments");
        List<JSONObject> batch = new ArrayList<>();
        for (String text : script) {
            JSONObject line = JSON.parseObject(text);
            if (!batch.isEmpty() && !batch.get(0).getString("batch").equals(line.getString("batch"))) {
                sendBatch(batch);
                batch.clear();
            }
            if (line.containsKey("batch")) {
                batch.add(line);
                continue;
            }
            if ("ZSTD".equals(line.getString("compress")) && !groups.contains("G-billing")) {
                // In the pause that the golden store has here: the orders that come later are what the group lacks.
                bill();
            }
            awaitTime(line.getLong("at"));
            if (line.containsKey("end")) {
                sendHalf(line);
            } else {
                sendOne(line);
            }
        }
    }

    /** No message before its time: then those that come later have theirs, too. */
    private static void awaitTime(long at) throws InterruptedException {
        while (System.currentTimeMillis() < at) {
            Thread.sleep(0, 200_000);
        }
    }

    private Message message(JSONObject line) {
        byte[] body = Base64.getDecoder().decode(line.getString("body"));
        if (line.containsKey("nextPhyOffset")) {
            body = filled(body, line);
        }
        Message message = new Message(line.getString("topic"), body);
        if (line.getString("tags") != null) {
            message.setTags(line.getString("tags"));
        }
        if (line.getString("keys") != null) {
            message.setKeys(line.getString("keys"));
        }
        JSONObject properties = line.getJSONObject("properties");
        properties.forEach((name, value) -> message.putUserProperty(name, (String) value));
        MessageAccessor.putProperty(message, MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX,
            line.getString("uniqueKey"));
        if (line.containsKey("delayLevel")) {
            message.setDelayTimeLevel(line.getIntValue("delayLevel"));
        }
        if (line.containsKey("delayMs")) {
            message.setDelayTimeMs(line.getLongValue("delayMs"));
        }
        return message;
    }

    /** So much of the body that the record ends where the golden store's does; the last line is made to close the list. */
    private byte[] filled(byte[] body, JSONObject line) {
        long begin = controller.getMessageStore().getMaxPhyOffset();
        int around = line.getIntValue("around");
        int length = (int) (line.getLong("nextPhyOffset") - begin - around);
        String text = new String(body, 0, Math.min(length, body.length) - 1, StandardCharsets.UTF_8);
        String whole = text.substring(0, text.lastIndexOf("},\n") + 1);
        byte[] found = new byte[length];
        Arrays.fill(found, (byte) ' ');
        byte[] begun = whole.getBytes(StandardCharsets.UTF_8);
        System.arraycopy(begun, 0, found, 0, begun.length);
        found[length - 1] = ']';
        return found;
    }

    private void sendOne(JSONObject line) throws Exception {
        Message message = message(line);
        String packed = line.getString("compress");
        DefaultMQProducer by = packed == null ? producer : packing.get(packed);
        // What is sent is packed in the message itself.
        byte[] body = message.getBody();
        SendResult result = by.send(message, new MessageQueue(message.getTopic(), NAME, line.getIntValue("queueId")));
        answer(line, body, result.getSendStatus(), result.getMsgId(), result);
    }

    private void sendBatch(List<JSONObject> lines) throws Exception {
        awaitTime(lines.get(0).getLong("at"));
        List<Message> messages = new ArrayList<>();
        for (JSONObject line : lines) {
            messages.add(message(line));
        }
        JSONObject first = lines.get(0);
        SendResult result = producer.send(messages,
            new MessageQueue(first.getString("topic"), NAME, first.getIntValue("queueId")));
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException(result.toString());
        }
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("kind", "batch");
        answer.put("topic", first.getString("topic"));
        answer.put("num", lines.size());
        answer.put("status", result.getSendStatus().toString());
        answer.put("msg_id", result.getMsgId());
        answer.put("offset_msg_id", result.getOffsetMsgId());
        answer.put("queue_id", result.getMessageQueue().getQueueId());
        answer.put("queue_offset", result.getQueueOffset());
        answers.println(JSON.toJSONString(answer));
    }

    private void sendHalf(JSONObject line) throws Exception {
        Message message = message(line);
        // A transaction goes to the queue whose turn it is; the turn is made the one that the script asks for.
        TopicPublishInfo queues = transactions.getDefaultMQProducerImpl().getTopicPublishInfoTable().get("Payments");
        int size = queues.getMessageQueueList().size();
        int before = (line.getIntValue("queueId") + size - 1) % size;
        while (queues.getSendWhichQueue().incrementAndGet() % size != before) {
            // The next one then is the queue that is meant.
        }
        byte[] body = message.getBody();
        LocalTransactionState end = LocalTransactionState.valueOf(line.getString("end"));
        SendResult result = transactions.sendMessageInTransaction(message, end);
        answer(line, body, result.getSendStatus(), result.getMsgId(), result);
    }

    private void answer(JSONObject line, byte[] body, SendStatus status, String uniqueKey, SendResult result) {
        if (status != SendStatus.SEND_OK) {
            throw new IllegalStateException(result.toString());
        }
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("kind", line.getString("kind"));
        answer.put("topic", line.getString("topic"));
        for (String name : Arrays.asList("keys", "tags")) {
            if (line.getString(name) != null) {
                answer.put(name, line.getString(name));
            }
        }
        answer.put("body_len", body.length);
        answer.put("body_crc", UtilAll.crc32(body));
        answer.put("status", status.toString());
        answer.put("msg_id", uniqueKey);
        answer.put("offset_msg_id", result.getOffsetMsgId());
        answer.put("queue_id", result.getMessageQueue().getQueueId());
        answer.put("queue_offset", result.getQueueOffset());
        answers.println(JSON.toJSONString(answer));
    }

    // ------------------------------------------------------------------------------------------------------ the readers

    /** A group reads what was paid and what was shipped. */
    private void bill() throws Exception {
        groups.add("G-billing");
        AtomicInteger billed = new AtomicInteger();
        DefaultMQPushConsumer billing = consumer("G-billing", "Orders", "paid || shipped", billed, false);
        await("orders", billed, 5000);
        // It says how far it came.
        Thread.sleep(500);
        billing.shutdown();
    }

    /** A group reads the stocks, each of its members all of them, and one fails with every payment. */
    private void consume() throws Exception {
        AtomicInteger shown = new AtomicInteger();
        AtomicInteger failed = new AtomicInteger();
        DefaultMQPushConsumer wall = connect(new DefaultMQPushConsumer("G-wall"));
        wall.setMessageModel(MessageModel.BROADCASTING);
        prepare(wall, "Batches", "*", shown, false);
        DefaultMQPushConsumer retry = consumer("G-retry", "Payments", "*", failed, true);
        await("stocks", shown, 654);
        await("payments", failed, 20);
        Thread.sleep(2000);
        wall.shutdown();
        retry.shutdown();
    }

    private DefaultMQPushConsumer consumer(String group, String topic, String tags, AtomicInteger seen, boolean fails)
        throws MQClientException {
        return prepare(connect(new DefaultMQPushConsumer(group)), topic, tags, seen, fails);
    }

    private DefaultMQPushConsumer prepare(DefaultMQPushConsumer consumer, String topic, String tags, AtomicInteger seen,
        boolean fails) throws MQClientException {
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, tags);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            seen.addAndGet(messages.size());
            return fails ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer;
    }

    private static void await(String what, AtomicInteger seen, int count) throws InterruptedException {
        for (int tries = 0; seen.get() < count; tries++) {
            if (tries == 1200) {
                throw new IllegalStateException("only " + seen + " of " + count + " " + what + " came");
            }
            Thread.sleep(100);
        }
    }

    /** Until the broker has asked once for each half message that nobody settled, and put it again. */
    private void awaitCheck() throws Exception {
        for (int tries = 0; controller.getMessageStore().getMaxOffsetInQueue("RMQ_SYS_TRANS_HALF_TOPIC", 0) < 80; tries++) {
            if (tries == 30_000) {
                throw new IllegalStateException("the broker does not ask for what nobody settled");
            }
            Thread.sleep(20);
        }
    }

    private void close() throws Exception {
        producer.shutdown();
        transactions.shutdown();
        packing.values().forEach(DefaultMQProducer::shutdown);
        DefaultMessageStore store = (DefaultMessageStore) controller.getMessageStore();
        while (store.dispatchBehindBytes() != 0) {
            Thread.sleep(10);
        }
    }
}
