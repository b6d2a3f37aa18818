package rmqstore.interop;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;

import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.store.CommitLog;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.queue.ConsumeQueueInterface;
import org.apache.rocketmq.store.queue.CqUnit;

/** Prints everything that the store can read back: its bounds, every record, every queue unit, every key. */
final class StoreDump {
    private static final int MAX_NUM = 64;

    private final PeerStore store;
    private final StoreTool tool;
    private final Map<String, TreeSet<String>> keys = new TreeMap<>();
    private final Map<String, TreeSet<String>> tags = new TreeMap<>();

    StoreDump(PeerStore store, StoreTool tool) {
        this.store = store;
        this.tool = tool;
    }

    void run() throws Exception {
        Map<String, Object> bounds = StoreTool.line("store");
        bounds.put("minPhy", store.getMinPhyOffset());
        bounds.put("maxPhy", store.getMaxPhyOffset());
        tool.print(bounds);
        records();
        queues();
        queries(keys, null);
        queries(tags, MessageConst.INDEX_TAG_TYPE);
    }

    private void records() {
        // -1 for a store that has no segment yet.
        long offset = Math.max(store.getMinPhyOffset(), 0);
        long end = store.getMaxPhyOffset();
        while (offset < end) {
            int size;
            int magic;
            SelectMappedBufferResult head = store.selectOneMessageByOffset(offset, 8);
            if (head == null) {
                throw new IllegalStateException("the log cannot be read at " + offset + " although it ends at " + end);
            }
            try {
                ByteBuffer buffer = head.getByteBuffer();
                size = buffer.getInt();
                magic = buffer.getInt();
            } finally {
                head.release();
            }
            if (magic == CommitLog.BLANK_MAGIC_CODE) {
                Map<String, Object> line = StoreTool.line("blank");
                line.put("offset", offset);
                line.put("size", size);
                tool.print(line);
            } else {
                MessageExt message = store.lookMessageByOffset(offset);
                if (message == null) {
                    // The store does not look behind the end of recovery; such a place can only be reported.
                    Map<String, Object> line = StoreTool.line("unreadable");
                    line.put("offset", offset);
                    tool.print(line);
                    return;
                }
                tool.print(StoreTool.message("msg", message));
                remember(message);
            }
            if (size <= 0) {
                throw new IllegalStateException("a record of size " + size + " at " + offset);
            }
            offset += size;
        }
    }

    private void remember(MessageExt message) {
        TreeSet<String> topicKeys = keys.computeIfAbsent(message.getTopic(), topic -> new TreeSet<>());
        String uniqueKey = message.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX);
        if (uniqueKey != null && !uniqueKey.isEmpty()) {
            topicKeys.add(uniqueKey);
        }
        String pieces = message.getKeys();
        if (pieces != null) {
            for (String key : pieces.split(MessageConst.KEY_SEPARATOR)) {
                if (!key.isEmpty()) {
                    topicKeys.add(key);
                }
            }
        }
        String tag = message.getTags();
        if (tag != null && !tag.isEmpty()) {
            tags.computeIfAbsent(message.getTopic(), topic -> new TreeSet<>()).add(tag);
        }
    }

    private void queues() {
        for (Map.Entry<String, ?> topic : new TreeMap<>(store.getConsumeQueueTable()).entrySet()) {
            for (ConsumeQueueInterface queue : new TreeMap<>(store.getConsumeQueueTable().get(topic.getKey())).values()) {
                List<String> units = new ArrayList<>();
                long min = queue.getMinOffsetInQueue();
                long max = queue.getMaxOffsetInQueue();
                for (long offset = min; offset < max; offset++) {
                    CqUnit unit = queue.get(offset);
                    units.add(unit == null ? offset + ":null"
                        : unit.getQueueOffset() + ":" + unit.getPos() + ":" + unit.getSize() + ":" + unit.getTagsCode());
                }
                Map<String, Object> line = StoreTool.line("queue");
                line.put("topic", queue.getTopic());
                line.put("queueId", queue.getQueueId());
                line.put("kind", queue.getCQType().toString());
                line.put("min", min);
                line.put("max", max);
                line.put("units", units);
                tool.print(line);
            }
        }
    }

    private void queries(Map<String, TreeSet<String>> byTopic, String indexType) {
        byTopic.forEach((topic, values) -> values.forEach(key -> {
            Map<String, Object> line = StoreTool.line("query");
            line.put("topic", topic);
            line.put("key", key);
            if (indexType != null) {
                line.put("indexType", indexType);
            }
            line.put("offsets", store.indexService()
                .queryOffset(topic, key, MAX_NUM, 0, Long.MAX_VALUE, indexType).getPhyOffsets());
            tool.print(line);
        }));
    }
}
