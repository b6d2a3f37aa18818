package rmqstore.interop;

import java.io.File;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentMap;

import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.SystemClock;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.index.IndexService;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * RocketMQ's DefaultMessageStore, opened alone. It adds nothing to the store but a clock that can be stopped, so that
 * a script decides the store timestamps and two stores can be compared byte for byte.
 */
final class PeerStore extends DefaultMessageStore {
    /** How long dispatch may take to catch up with the log before that is an error. */
    private static final long DISPATCH_TIMEOUT_MS = 120_000;

    private final BrokerStatsManager stats;
    private final StoppableClock clock = new StoppableClock();

    private PeerStore(MessageStoreConfig config, BrokerStatsManager stats, BrokerConfig broker,
                      ConcurrentMap<String, TopicConfig> topics) throws Exception {
        super(config, stats, null, broker, topics);
        this.stats = stats;
    }

    /** Loads, recovers and starts the store, and waits until every record of the log is dispatched. */
    static PeerStore open(StoreOptions options) throws Exception {
        BrokerConfig broker = new BrokerConfig();
        broker.setBrokerName("peer");
        broker.setBrokerClusterName("peer");
        BrokerStatsManager stats = new BrokerStatsManager(broker);
        ConcurrentMap<String, TopicConfig> topics = new ConcurrentHashMap<>();
        for (String topic : options.batchTopics) {
            addBatchTopic(topics, topic);
        }
        // The store refuses a directory whose batch queues belong to topics that it takes for ordinary ones.
        String[] found = new File(options.directory, "batchconsumequeue").list();
        if (found != null) {
            for (String topic : found) {
                addBatchTopic(topics, topic);
            }
        }
        PeerStore store = new PeerStore(options.config, stats, broker, topics);
        PatientIndexService.install(store);
        if (!store.load()) {
            throw new IllegalStateException("DefaultMessageStore.load() refused " + options.directory);
        }
        store.start();
        store.awaitDispatch();
        return store;
    }

    private static void addBatchTopic(ConcurrentMap<String, TopicConfig> topics, String topic) {
        TopicConfig config = new TopicConfig(topic);
        config.getAttributes().put("queue.type", "BatchCQ");
        topics.put(topic, config);
    }

    IndexService indexService() {
        return indexService;
    }

    /** Stops the store's clock at a time (ms since the epoch); null lets it run again. */
    void stopClock(Long timestamp) {
        clock.stoppedAt = timestamp;
    }

    void awaitDispatch() throws InterruptedException {
        long deadline = System.nanoTime() + DISPATCH_TIMEOUT_MS * 1_000_000;
        while (dispatchBehindBytes() != 0) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("dispatch is still " + dispatchBehindBytes() + " bytes behind after "
                    + DISPATCH_TIMEOUT_MS + " ms");
            }
            Thread.sleep(1);
        }
    }

    /** Closes the store as a broker does that is asked to stop. */
    void close() throws InterruptedException {
        QuickClose.run(this::shutdown);
        stats.shutdown();
    }

    // The super constructor runs before this class's fields are set.
    @Override
    public SystemClock getSystemClock() {
        return clock == null ? super.getSystemClock() : clock;
    }

    @Override
    public long now() {
        return getSystemClock().now();
    }

    private static final class StoppableClock extends SystemClock {
        private volatile Long stoppedAt;

        @Override
        public long now() {
            Long stopped = stoppedAt;
            return stopped == null ? super.now() : stopped;
        }
    }
}
