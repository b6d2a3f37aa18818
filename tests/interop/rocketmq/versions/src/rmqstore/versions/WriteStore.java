package rmqstore.versions;

import java.io.File;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;

import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.store.DefaultMessageStore;

/** Writes one golden store: a name server, a broker and its clients in one process, and an orderly shutdown. */
public final class WriteStore {
    private static final int ORDERS = 60;
    private static final String[] TAGS = {"created", "paid", "shipped", "取消"};
    private static final String GROUP = "G-billing";

    private final List<ClientConfig> clients = new ArrayList<>();
    private final BrokerController controller;
    private final DefaultMQProducer producer;

    private WriteStore(BrokerController controller) throws Exception {
        this.controller = controller;
        producer = connect(new DefaultMQProducer("P-orders"));
        producer.start();
    }

    /** Arguments: DIR [name=value ...], options of MessageStoreConfig. The directory must be there. */
    public static void main(String[] args) throws Exception {
        int status = 1;
        try {
            run(args[0], Arrays.copyOfRange(args, 1, args.length));
            status = 0;
        } catch (Throwable e) {
            e.printStackTrace();
        }
        // The name server and the clients leave threads behind, and an exit would run the broker's shutdown once more.
        Runtime.getRuntime().halt(status);
    }

    private static void run(String directory, String[] settings) throws Exception {
        String home = System.getProperty("user.home");
        NamesrvConfig config = new NamesrvConfig();
        config.setRocketmqHome(home);
        config.setKvConfigPath(home + File.separator + "kvConfig.json");
        NettyServerConfig server = new NettyServerConfig();
        server.setListenPort(Broker.NAME_SERVER_PORT);
        NamesrvController nameServer = new NamesrvController(config, server);
        if (!nameServer.initialize()) {
            throw new IllegalStateException("NamesrvController.initialize() failed");
        }
        nameServer.start();
        BrokerController controller = Broker.load(directory, settings);
        controller.start();
        WriteStore writer = new WriteStore(controller);
        writer.topic("Orders", 4);
        writer.topic("Payments", 2);
        writer.topic("Documents", 1);
        writer.orders();
        writer.odd();
        writer.transactions();
        writer.delayed();
        writer.consume("Orders", ORDERS);
        writer.close();
        controller.shutdown();
    }

    private <T extends ClientConfig> T connect(T client) {
        client.setNamesrvAddr(Broker.nameServer());
        // It stands in the unique keys.
        client.setClientIP("127.0.0.1");
        client.setInstanceName("golden-" + clients.size());
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

    private void send(DefaultMQProducer by, Message message, int queueId) throws Exception {
        SendStatus status = by.send(message, new MessageQueue(message.getTopic(), Broker.NAME, queueId)).getSendStatus();
        if (status != SendStatus.SEND_OK) {
            throw new IllegalStateException(status + " for " + message);
        }
    }

    private static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    /** Plain messages of four queues: keys, some of them shared, tags, properties, flags. */
    private void orders() throws Exception {
        for (int i = 0; i < ORDERS; i++) {
            byte[] body = bytes("order " + i + " of golden store");
            Message message = new Message("Orders", TAGS[i % TAGS.length], "ORD-" + (1000 + i), body);
            if (i % 3 == 0) {
                message.setKeys("ORD-" + (1000 + i) + " CUST-" + i % 7);
            }
            message.putUserProperty("region", i % 2 == 0 ? "EU" : "Ελλάδα");
            message.setFlag(i % 5);
            send(producer, message, i % 4);
        }
    }

    /** Keys that are hard to get right, bodies of every kind, a client's batch. */
    private void odd() throws Exception {
        String[] odd = {"Aa BB", "AaAa BBBB AaBB", "钥匙 ключ", "😀-1 𝒳", "a  b ", "polygenelubricants"};
        for (String keys : odd) {
            Message message = new Message("Documents", "odd", bytes(keys));
            message.setKeys(keys);
            send(producer, message, 0);
        }
        send(producer, new Message("Documents", new byte[] {0}), 0);
        send(producer, new Message("Documents", "Aa", bytes("a tag alone")), 0);
        for (String type : Arrays.asList("ZLIB", "LZ4", "ZSTD")) {
            // A producer asks for this once, when it is made.
            System.setProperty("rocketmq.message.compressType", type);
            DefaultMQProducer compressing = connect(new DefaultMQProducer("P-" + type));
            compressing.setCompressMsgBodyOverHowmuch(1000);
            compressing.start();
            StringBuilder text = new StringBuilder();
            for (int i = 0; i < 400; i++) {
                text.append(type).append(" compresses this ").append(i % 13).append('\n');
            }
            send(compressing, new Message("Documents", type, "DOC-" + type, bytes(text.toString())), 0);
            compressing.shutdown();
        }
        List<Message> batch = new ArrayList<>();
        for (int i = 0; i < 7; i++) {
            batch.add(new Message("Payments", "batch", "PAY-" + i, bytes("one of seven " + i)));
        }
        producer.send(batch, new MessageQueue("Payments", Broker.NAME, 1));
        byte[] large = new byte[3500];
        for (int i = 0; i < large.length; i++) {
            large[i] = (byte) (i * 31 + i / 251);
        }
        for (int i = 0; i < 6; i++) {
            send(producer, new Message("Payments", "large", "LARGE-" + i, large), 0);
        }
    }

    /** One committed, one rolled back, one of which nothing is known. */
    private void transactions() throws Exception {
        TransactionMQProducer sender = connect(new TransactionMQProducer("P-transactions"));
        sender.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return (LocalTransactionState) argument;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.UNKNOW;
            }
        });
        sender.start();
        for (LocalTransactionState state : LocalTransactionState.values()) {
            sender.sendMessageInTransaction(new Message("Payments", "tx", "TX-" + state, bytes(state.name())), state);
        }
        // The end of a transaction goes one way.
        Thread.sleep(1000);
        sender.shutdown();
    }

    /** Two that become due now, two that stay where they wait. */
    private void delayed() throws Exception {
        for (int level = 1; level <= 4; level++) {
            Message message = new Message("Payments", "delayed", "DELAY-" + level, bytes("level " + level));
            message.setDelayTimeLevel(level);
            send(producer, message, 1);
        }
        Thread.sleep(5000);
    }

    /** A group reads a topic to its end; with one of the messages it fails, so that this one waits for its retry. */
    private void consume(String topic, int count) throws Exception {
        DefaultMQPushConsumer consumer = connect(new DefaultMQPushConsumer(GROUP));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        AtomicInteger seen = new AtomicInteger();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            boolean fails = messages.get(0).getKeys().startsWith("ORD-1007");
            seen.addAndGet(messages.size());
            return fails ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        for (int tries = 0; seen.get() < count; tries++) {
            if (tries == 600) {
                throw new IllegalStateException("only " + seen + " messages of topic " + topic + " came");
            }
            Thread.sleep(100);
        }
        Thread.sleep(1000);
        // It says how far it came.
        consumer.shutdown();
        Thread.sleep(1000);
    }

    private void close() throws Exception {
        producer.shutdown();
        DefaultMessageStore store = (DefaultMessageStore) controller.getMessageStore();
        while (store.dispatchBehindBytes() != 0) {
            Thread.sleep(10);
        }
    }
}
