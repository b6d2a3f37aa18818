package rmqstore.versions;

import java.io.BufferedOutputStream;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;

import com.alibaba.fastjson2.JSON;

import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.index.IndexService;

/**
 * Writes what this version's own store reads from a directory that was closed in order, in the lines of
 * tests/data/rocketmq. It asks the store's classes for everything. Loading writes into the directory: give a copy.
 */
public final class ReadStore {
    private static final int BLANK_MAGIC_CODE = -875286124;
    private static final int MAX_NUM = 64;

    private final DefaultMessageStore store;
    private final PrintStream out;
    private final Map<String, TreeSet<String>> keys = new TreeMap<>();

    private ReadStore(DefaultMessageStore store, PrintStream out) {
        this.store = store;
        this.out = out;
    }

    /** Arguments: DIR FILE [name=value ...], options of MessageStoreConfig. */
    public static void main(String[] args) throws Exception {
        int status = 1;
        try (PrintStream out = new PrintStream(
            new BufferedOutputStream(new FileOutputStream(args[1])), false, StandardCharsets.UTF_8.name())) {
            String[] settings = Arrays.copyOfRange(args, 2, args.length);
            new ReadStore((DefaultMessageStore) Broker.load(args[0], settings).getMessageStore(), out).run();
            status = 0;
        } catch (Throwable e) {
            e.printStackTrace();
        }
        Runtime.getRuntime().halt(status);
    }

    private void run() throws Exception {
        Map<String, Object> bounds = line("store");
        bounds.put("minPhy", store.getMinPhyOffset());
        bounds.put("maxPhy", store.getMaxPhyOffset());
        print(bounds);
        records();
        queues();
        queries();
    }

    private void records() {
        long offset = store.getMinPhyOffset();
        while (offset < store.getMaxPhyOffset()) {
            SelectMappedBufferResult head = store.selectOneMessageByOffset(offset, 8);
            ByteBuffer buffer = head.getByteBuffer();
            int size = buffer.getInt();
            int magic = buffer.getInt();
            head.release();
            if (size <= 0) {
                throw new IllegalStateException("a record of size " + size + " at " + offset);
            }
            if (magic == BLANK_MAGIC_CODE) {
                Map<String, Object> line = line("blank");
                line.put("offset", offset);
                line.put("size", size);
                print(line);
            } else {
                MessageExt message = store.lookMessageByOffset(offset);
                print(message(message));
                remember(message);
            }
            offset += size;
        }
    }

    private void remember(MessageExt message) {
        TreeSet<String> ofTopic = keys.computeIfAbsent(message.getTopic(), topic -> new TreeSet<>());
        String uniqueKey = message.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX);
        if (uniqueKey != null && !uniqueKey.isEmpty()) {
            ofTopic.add(uniqueKey);
        }
        if (message.getKeys() != null) {
            for (String key : message.getKeys().split(MessageConst.KEY_SEPARATOR)) {
                if (!key.isEmpty()) {
                    ofTopic.add(key);
                }
            }
        }
    }

    private void queues() {
        for (String topic : new TreeSet<>(store.getConsumeQueueTable().keySet())) {
            // The type of a queue has another name in 4.9.
            for (var queue : new TreeMap<>(store.getConsumeQueueTable().get(topic)).values()) {
                List<String> units = new ArrayList<>();
                for (long offset = queue.getMinOffsetInQueue(); offset < queue.getMaxOffsetInQueue(); offset++) {
                    units.add(Units.text(queue, offset));
                }
                Map<String, Object> line = line("queue");
                line.put("topic", topic);
                line.put("queueId", queue.getQueueId());
                line.put("kind", "SimpleCQ");
                line.put("min", queue.getMinOffsetInQueue());
                line.put("max", queue.getMaxOffsetInQueue());
                line.put("units", units);
                print(line);
            }
        }
    }

    private void queries() throws ReflectiveOperationException {
        Field field = DefaultMessageStore.class.getDeclaredField("indexService");
        field.setAccessible(true);
        IndexService index = (IndexService) field.get(store);
        keys.forEach((topic, values) -> values.forEach(key -> {
            Map<String, Object> line = line("query");
            line.put("topic", topic);
            line.put("key", key);
            line.put("offsets", index.queryOffset(topic, key, MAX_NUM, 0, Long.MAX_VALUE).getPhyOffsets());
            print(line);
        }));
    }

    private static Map<String, Object> message(MessageExt message) {
        Map<String, Object> line = line("msg");
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

    private static Map<String, Object> line(String type) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("type", type);
        return line;
    }

    private void print(Map<String, Object> line) {
        out.print(JSON.toJSONString(line));
        out.print('\n');
    }
}
