package rmqstore.interop;

import java.io.BufferedReader;
import java.io.File;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;

import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.PutMessageStatus;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.index.IndexFile;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * The real RocketMQ store, told over standard input what to do: a line of JSON is a command, a line of JSON is its answer with
 * the nanoseconds that the work took ("ns") and what it came to. One process serves a whole run, so that its code is compiled.
 *
 * Only the work is timed: texts and messages are made before, new ones for every round, because String keeps its hash.
 */
public final class Peer {
    private static final String[] TAGS = {"created", "paid", "shipped"};
    private static final InetSocketAddress HOST = new InetSocketAddress(InetAddress.getLoopbackAddress(), 10911);

    private final Map<String, IndexFile> indexes = new HashMap<>();
    private final Map<String, DefaultMessageStore> stores = new HashMap<>();

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
        // Whatever a library prints must not get between the answers.
        System.setOut(System.err);
        Peer peer = new Peer();
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                peer.execute(JSON.parseObject(line), answer);
            } catch (Throwable error) {
                error.printStackTrace();
                answer.put("error", error.toString());
            }
            answers.println(JSON.toJSONString(answer));
        }
        // An orderly end of stores that nobody needs any more would take seconds.
        Runtime.getRuntime().halt(0);
    }

    private void execute(JSONObject command, Map<String, Object> answer) throws Exception {
        switch (command.getString("op")) {
            case "hello" -> answer.put("java", System.getProperty("java.version"));
            case "index-open" -> openIndex(command);
            case "index-reload" -> indexes.get(command.getString("path")).load();
            case "index-destroy" -> indexes.remove(command.getString("path")).destroy(1000);
            case "index-put" -> putKeys(command, answer);
            case "index-select" -> selectPhyOffsets(command, answer);
            case "open" -> open(command, answer);
            case "close" -> close(command);
            case "put" -> put(command, answer);
            case "get" -> get(command, answer);
            case "query" -> query(command, answer);
            case "scan" -> scan(command, answer);
            default -> throw new IllegalArgumentException("unknown op in " + command);
        }
    }

    // ------------------------------------------------------------------------------------------------------- index

    private void openIndex(JSONObject command) throws Exception {
        String path = command.getString("path");
        IndexFile index = new IndexFile(path, command.getIntValue("slots"), command.getIntValue("entries"), 0, 0);
        index.load();
        indexes.put(path, index);
    }

    private void putKeys(JSONObject command, Map<String, Object> answer) throws Exception {
        IndexFile index = indexes.get(command.getString("path"));
        String[] keys = texts(command);
        long step = command.getLongValue("step");
        long time = command.getLongValue("time");
        int taken = 0;
        System.gc();
        long begin = System.nanoTime();
        for (int i = 0; i < keys.length; i++) {
            if (index.putKey(keys[i], i * step, time + i / 50)) {
                taken++;
            }
        }
        answer.put("ns", System.nanoTime() - begin);
        answer.put("taken", taken);
    }

    private void selectPhyOffsets(JSONObject command, Map<String, Object> answer) throws Exception {
        IndexFile index = indexes.get(command.getString("path"));
        String[] keys = texts(command);
        long found = 0;
        long sum = 0;
        System.gc();
        long begin = System.nanoTime();
        for (String key : keys) {
            // A list of this capacity is what IndexService.queryOffset makes for each question.
            List<Long> offsets = new ArrayList<>(64);
            index.selectPhyOffset(offsets, key, 64, 0, Long.MAX_VALUE);
            found += offsets.size();
            for (long offset : offsets) {
                sum += offset;
            }
        }
        answer.put("ns", System.nanoTime() - begin);
        answer.put("found", found);
        answer.put("sum", sum);
    }

    // ------------------------------------------------------------------------------------------------------- store

    /** Loads (which recovers) and starts a store, and waits until everything is dispatched; "ns" is the time of load(). */
    private void open(JSONObject command, Map<String, Object> answer) throws Exception {
        String directory = command.getString("path");
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(directory);
        config.setStorePathCommitLog(directory + File.separator + "commitlog");
        config.setHaListenPort(0);
        config.setTimerWheelEnable(false);
        config.setEnableCompaction(false);
        // Nothing is to be cleaned or refused under the measurement.
        config.setFileReservedTime(1_000_000);
        config.setCleanFileForciblyEnable(false);
        config.setDiskMaxUsedSpaceRatio(95);
        BrokerConfig broker = new BrokerConfig();
        BrokerStatsManager stats = new BrokerStatsManager(broker);
        long begin = System.nanoTime();
        DefaultMessageStore store = new DefaultMessageStore(config, stats, null, broker, new ConcurrentHashMap<>());
        if (!store.load()) {
            throw new IllegalStateException("load() refused " + directory);
        }
        answer.put("ns", System.nanoTime() - begin);
        store.start();
        awaitDispatch(store);
        answer.put("end", store.getMaxPhyOffset());
        answer.put("units", store.getConsumeQueueTable().values().stream()
            .flatMap(queues -> queues.values().stream())
            .mapToLong(queue -> queue.getMaxOffsetInQueue())
            .sum());
        stores.put(directory, store);
    }

    private void close(JSONObject command) throws Exception {
        QuickClose.run(stores.remove(command.getString("path"))::shutdown);
    }

    private static void awaitDispatch(DefaultMessageStore store) {
        while (store.dispatchBehindBytes() != 0) {
            Thread.onSpinWait();
        }
    }

    private void put(JSONObject command, Map<String, Object> answer) throws Exception {
        DefaultMessageStore store = stores.get(command.getString("path"));
        String topic = command.getString("topic");
        int size = command.getIntValue("size");
        int run = command.getIntValue("run");
        int queues = command.getIntValue("queues");
        byte[] bodies = Files.readAllBytes(Path.of(command.getString("bodies")));
        String[] keys = texts(command);
        MessageExtBrokerInner[] messages = new MessageExtBrokerInner[keys.length];
        for (int i = 0; i < keys.length; i++) {
            MessageExtBrokerInner message = new MessageExtBrokerInner();
            message.setTopic(topic);
            message.setQueueId(i / run % queues);
            message.setBody(java.util.Arrays.copyOfRange(bodies, i * size, (i + 1) * size));
            message.setKeys(keys[i]);
            message.setTags(TAGS[i % TAGS.length]);
            message.setBornTimestamp(System.currentTimeMillis());
            message.setBornHost(HOST);
            message.setStoreHost(HOST);
            message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
            messages[i] = message;
        }
        long before = store.getMaxPhyOffset();
        System.gc();
        long begin = System.nanoTime();
        for (MessageExtBrokerInner message : messages) {
            PutMessageStatus status = store.putMessage(message).getPutMessageStatus();
            if (status != PutMessageStatus.PUT_OK) {
                throw new IllegalStateException("putMessage answered " + status);
            }
        }
        awaitDispatch(store);
        answer.put("ns", System.nanoTime() - begin);
        answer.put("bytes", store.getMaxPhyOffset() - before);
    }

    private void get(JSONObject command, Map<String, Object> answer) throws Exception {
        DefaultMessageStore store = stores.get(command.getString("path"));
        String topic = command.getString("topic");
        int each = command.getIntValue("each");
        long messages = 0;
        long sum = 0;
        System.gc();
        long begin = System.nanoTime();
        for (int queue = 0; queue < command.getIntValue("queues"); queue++) {
            long offset = 0;
            while (true) {
                GetMessageResult result = store.getMessage("group", topic, queue, offset, each, null);
                try {
                    if (result.getStatus() != GetMessageStatus.FOUND) {
                        break;
                    }
                    for (ByteBuffer record : result.getMessageBufferList()) {
                        MessageExt message = MessageDecoder.decode(record, true, true, false, false, true);
                        sum += message.getBody().length + message.getKeys().length() + message.getTopic().length()
                            + message.getQueueOffset();
                        messages++;
                    }
                    offset = result.getNextBeginOffset();
                } finally {
                    result.release();
                }
            }
        }
        answer.put("ns", System.nanoTime() - begin);
        answer.put("messages", messages);
        answer.put("sum", sum);
    }

    private void query(JSONObject command, Map<String, Object> answer) throws Exception {
        DefaultMessageStore store = stores.get(command.getString("path"));
        String topic = command.getString("topic");
        String[] keys = texts(command);
        long messages = 0;
        long sum = 0;
        System.gc();
        long begin = System.nanoTime();
        for (String key : keys) {
            QueryMessageResult result = store.queryMessage(topic, key, 32, 0, Long.MAX_VALUE);
            try {
                for (ByteBuffer record : result.getMessageBufferList()) {
                    MessageExt message = MessageDecoder.decode(record, true, true, false, false, true);
                    // The store finds by hash; its client compares the keys.
                    if (key.equals(message.getKeys())) {
                        sum += message.getBody().length + message.getQueueOffset();
                        messages++;
                    }
                }
            } finally {
                result.release();
            }
        }
        answer.put("ns", System.nanoTime() - begin);
        answer.put("messages", messages);
        answer.put("sum", sum);
    }

    /** Decodes every record of one segment that is mapped, CRC included, up to its first bytes that are none. */
    private void scan(JSONObject command, Map<String, Object> answer) throws Exception {
        try (FileChannel channel = FileChannel.open(Path.of(command.getString("segment")), StandardOpenOption.READ)) {
            ByteBuffer log = channel.map(FileChannel.MapMode.READ_ONLY, 0, command.getLongValue("end"));
            long messages = 0;
            long sum = 0;
            System.gc();
            long begin = System.nanoTime();
            while (log.hasRemaining()) {
                MessageExt message = MessageDecoder.decode(log, true, true, false, false, true);
                if (message == null) {
                    throw new IllegalStateException("no record at " + log.position());
                }
                sum += message.getBody().length + message.getQueueOffset();
                messages++;
            }
            answer.put("ns", System.nanoTime() - begin);
            answer.put("messages", messages);
            answer.put("sum", sum);
        }
    }

    /** The first "count" texts of a file in which each takes "width" bytes, as strings that nobody has hashed. */
    private static String[] texts(JSONObject command) throws Exception {
        byte[] all = Files.readAllBytes(Path.of(command.getString("keys")));
        int width = command.getIntValue("width");
        String[] texts = new String[command.getIntValue("count")];
        for (int i = 0; i < texts.length; i++) {
            texts[i] = new String(all, i * width, width, StandardCharsets.ISO_8859_1);
        }
        return texts;
    }
}
