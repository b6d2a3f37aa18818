package rmqstore.interop;

import java.lang.reflect.Field;

import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.index.IndexFile;
import org.apache.rocketmq.store.index.IndexService;

/**
 * RocketMQ's index service, which never makes two files within a millisecond. They are named by the time in milliseconds,
 * and of two with one name the second overwrites what the first holds: with files of 20 entries that happens all the
 * time, and would hide what a test is about.
 */
final class PatientIndexService extends IndexService {
    private IndexFile last;

    private PatientIndexService(DefaultMessageStore store) {
        super(store);
    }

    /** Gives a store that is not loaded yet this index service instead of its own. */
    static void install(DefaultMessageStore store) throws ReflectiveOperationException {
        Field field = DefaultMessageStore.class.getDeclaredField("indexService");
        field.setAccessible(true);
        field.set(store, new PatientIndexService(store));
    }

    @Override
    public IndexFile getAndCreateLastIndexFile() {
        IndexFile file = super.getAndCreateLastIndexFile();
        if (file != last) {
            last = file;
            long made = System.currentTimeMillis();
            while (System.currentTimeMillis() == made) {
                Thread.onSpinWait();
            }
        }
        return file;
    }
}
