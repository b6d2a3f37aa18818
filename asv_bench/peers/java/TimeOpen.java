import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ConcurrentHashMap;

import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * Opens stores one after the other with RocketMQ's DefaultMessageStore, default configuration, and prints a line for each:
 * nanoseconds of load() (which recovers), nanoseconds until it was started and everything was dispatched, the end of the log,
 * and how many units its queues hold. A store is left as a killed broker leaves it.
 */
public final class TimeOpen {
    private TimeOpen() {
    }

    public static void main(String[] directories) throws Exception {
        List<String> lines = new ArrayList<>();
        for (String directory : directories) {
            MessageStoreConfig config = new MessageStoreConfig();
            config.setStorePathRootDir(directory);
            config.setStorePathCommitLog(directory + "/commitlog");
            config.setHaListenPort(0);
            config.setTimerWheelEnable(false);
            config.setEnableCompaction(false);
            config.setFileReservedTime(1_000_000);
            config.setCleanFileForciblyEnable(false);
            config.setDiskMaxUsedSpaceRatio(95);
            BrokerConfig broker = new BrokerConfig();
            BrokerStatsManager stats = new BrokerStatsManager(broker);
            long begin = System.nanoTime();
            DefaultMessageStore store =
                new DefaultMessageStore(config, stats, null, broker, new ConcurrentHashMap<>());
            if (!store.load()) {
                throw new IllegalStateException("load() refused " + directory);
            }
            long loaded = System.nanoTime() - begin;
            store.start();
            while (store.dispatchBehindBytes() != 0) {
                Thread.onSpinWait();
            }
            long ready = System.nanoTime() - begin;
            long units = store.getConsumeQueueTable().values().stream()
                .flatMap(queues -> queues.values().stream())
                .mapToLong(queue -> queue.getMaxOffsetInQueue())
                .sum();
            lines.add("opened " + loaded + " " + ready + " " + store.getMaxPhyOffset() + " " + units);
        }
        lines.forEach(System.out::println);
        System.out.flush();
        // Nothing is closed: an orderly end would take longer than all that was measured.
        Runtime.getRuntime().halt(0);
    }
}
