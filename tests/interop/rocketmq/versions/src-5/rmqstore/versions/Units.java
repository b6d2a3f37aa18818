package rmqstore.versions;

import org.apache.rocketmq.store.queue.ConsumeQueueInterface;
import org.apache.rocketmq.store.queue.CqUnit;

/** A unit of a queue of 5.x. */
final class Units {
    private Units() {
    }

    static String text(ConsumeQueueInterface queue, long queueOffset) {
        CqUnit unit = queue.get(queueOffset);
        return unit.getQueueOffset() + ":" + unit.getPos() + ":" + unit.getSize() + ":" + unit.getTagsCode();
    }
}
