package rmqstore.versions;

import java.nio.ByteBuffer;

import org.apache.rocketmq.store.ConsumeQueue;
import org.apache.rocketmq.store.SelectMappedBufferResult;

/** A unit of a queue of 4.9, which gives it as bytes. */
final class Units {
    private Units() {
    }

    static String text(ConsumeQueue queue, long queueOffset) {
        SelectMappedBufferResult result = queue.getIndexBuffer(queueOffset);
        try {
            ByteBuffer buffer = result.getByteBuffer();
            String text = queueOffset + ":" + buffer.getLong() + ":" + buffer.getInt() + ":";
            long tagsCode = buffer.getLong();
            return text + (queue.isExtAddr(tagsCode) ? queue.getExt(tagsCode).getTagsCode() : tagsCode);
        } finally {
            result.release();
        }
    }
}
