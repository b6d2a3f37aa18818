package rmqstore.interop;

import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.ha.DefaultHAService;

/**
 * Replication that never opens a socket. The store finds it through META-INF/service, as it would find any other
 * replication service; RocketMQ's own one listens on every interface of the machine, which a test must not do.
 */
public final class SilentHAService extends DefaultHAService {
    @Override
    public void init(DefaultMessageStore store) {
    }

    @Override
    public void start() {
    }

    @Override
    public void shutdown() {
    }
}
