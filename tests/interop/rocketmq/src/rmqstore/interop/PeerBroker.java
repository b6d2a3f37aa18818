package rmqstore.interop;

import java.io.File;
import java.lang.reflect.Method;
import java.util.Properties;

import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.common.TlsMode;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.netty.TlsSystemConfig;
import org.apache.rocketmq.store.DefaultMessageStore;

/** A real name server and a real broker in this process, both on loopback, on ports that the system chooses. */
final class PeerBroker {
    static final String NAME = "broker-a";
    static final String CLUSTER = "DefaultCluster";
    private static final String LOOPBACK = "127.0.0.1";
    private static final long DISPATCH_TIMEOUT_MS = 120_000;

    final BrokerController controller;
    private final NamesrvController namesrv;

    private PeerBroker(NamesrvController namesrv, BrokerController controller) {
        this.namesrv = namesrv;
        this.controller = controller;
    }

    static {
        // The remoting servers would each make an RSA key when they start.
        TlsSystemConfig.tlsMode = TlsMode.DISABLED;
        // Clients look for their queues more often than every 20 s.
        System.setProperty("rocketmq.client.rebalance.waitInterval", "200");
        System.setProperty("rocketmq.client.rebalance.minInterval", "50");
    }

    /** Starts both. A store that the broker refuses, or cannot lock, is an exception. */
    static PeerBroker start(StoreOptions options) throws Exception {
        NamesrvConfig namesrvConfig = new NamesrvConfig();
        String home = System.getProperty("user.home");
        namesrvConfig.setRocketmqHome(home);
        namesrvConfig.setKvConfigPath(home + File.separator + "kvConfig.json");
        NamesrvController namesrv = new NamesrvController(namesrvConfig, loopback());
        if (!namesrv.initialize()) {
            throw new IllegalStateException("NamesrvController.initialize() failed");
        }
        namesrv.start();

        BrokerConfig brokerConfig = new BrokerConfig();
        brokerConfig.setRocketmqHome(home);
        brokerConfig.setBrokerName(NAME);
        brokerConfig.setBrokerClusterName(CLUSTER);
        brokerConfig.setBrokerIP1(LOOPBACK);
        brokerConfig.setBrokerIP2(LOOPBACK);
        brokerConfig.setNamesrvAddr(LOOPBACK + ":" + namesrv.getNettyServerConfig().getListenPort());
        // A busy machine is no reason to turn a send away, which a test would have to send again.
        brokerConfig.setBrokerFastFailureEnable(false);
        brokerConfig.setFlushConsumerOffsetInterval(1000);
        // The pop protocol, which no test uses, brings many threads.
        brokerConfig.setPopConsumerFSServiceInit(false);
        setAll(brokerConfig, options.brokerSettings);
        BrokerController controller =
            new BrokerController(brokerConfig, loopback(), new NettyClientConfig(), options.config);
        if (!controller.initialize()) {
            throw new IllegalStateException("BrokerController.initialize() refused " + options.directory);
        }
        controller.start();
        PeerBroker broker = new PeerBroker(namesrv, controller);
        broker.awaitDispatch();
        return broker;
    }

    private static NettyServerConfig loopback() {
        NettyServerConfig config = new NettyServerConfig();
        config.setBindAddress(LOOPBACK);
        config.setListenPort(0);
        return config;
    }

    private static void setAll(BrokerConfig config, Properties settings) {
        for (String name : settings.stringPropertyNames()) {
            StoreOptions.requireOption(BrokerConfig.class, name);
        }
        MixAll.properties2Object(settings, config);
    }

    DefaultMessageStore store() {
        return (DefaultMessageStore) controller.getMessageStore();
    }

    String nameServerAddress() {
        return LOOPBACK + ":" + namesrv.getNettyServerConfig().getListenPort();
    }

    String brokerAddress() {
        return controller.getBrokerAddr();
    }

    void awaitDispatch() throws InterruptedException {
        long deadline = System.nanoTime() + DISPATCH_TIMEOUT_MS * 1_000_000;
        while (store().dispatchBehindBytes() != 0) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("dispatch is still " + store().dispatchBehindBytes()
                    + " bytes behind after " + DISPATCH_TIMEOUT_MS + " ms");
            }
            Thread.sleep(1);
        }
    }

    /** Stops the broker as an operator does; the name server has nothing to keep and ends with the process. */
    void close() throws Exception {
        awaitDispatch();
        QuickClose.run(controller::shutdown);
    }
}
