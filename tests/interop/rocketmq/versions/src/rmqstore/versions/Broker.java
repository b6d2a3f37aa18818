package rmqstore.versions;

import java.io.File;
import java.lang.reflect.Constructor;
import java.util.Arrays;
import java.util.Properties;

import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** A broker of whichever version is on the class path, on a store directory; its addresses are always the same. */
final class Broker {
    static final String NAME = "broker-a";
    /** What a store's records name as their host. */
    static final int PORT = 20911;
    static final int NAME_SERVER_PORT = 20976;
    private static final int REPLICATION_PORT = 20912;
    private static final String LOOPBACK = "127.0.0.1";

    private Broker() {
    }

    /**
     * The broker with its store loaded and recovered, but not started.
     *
     * @param settings options of MessageStoreConfig, name=value
     */
    static BrokerController load(String directory, String... settings) throws Exception {
        Properties properties = new Properties();
        properties.setProperty("storePathRootDir", directory);
        properties.setProperty("storePathCommitLog", directory + File.separator + "commitlog");
        properties.setProperty("haListenPort", Integer.toString(REPLICATION_PORT));
        properties.setProperty("mappedFileSizeCommitLog", "16384");
        properties.setProperty("mappedFileSizeConsumeQueue", "200");
        properties.setProperty("mappedFileSizeConsumeQueueExt", "256");
        properties.setProperty("maxHashSlotNum", "50");
        properties.setProperty("maxIndexNum", "150");
        properties.setProperty("messageDelayLevel", "1s 2s 30m 1h");
        // Nothing may be deleted while a golden store is made, whatever the hour or the disk.
        properties.setProperty("diskMaxUsedSpaceRatio", "95");
        properties.setProperty("cleanFileForciblyEnable", "false");
        properties.setProperty("fileReservedTime", "1000000");
        // 4.9 knows no time wheel and passes over the name.
        properties.setProperty("timerWheelEnable", "false");
        for (String setting : settings) {
            String[] pair = setting.split("=", 2);
            properties.setProperty(pair[0], pair[1]);
        }
        MessageStoreConfig store = new MessageStoreConfig();
        MixAll.properties2Object(properties, store);

        BrokerConfig config = new BrokerConfig();
        config.setRocketmqHome(System.getProperty("user.home"));
        config.setBrokerName(NAME);
        config.setBrokerClusterName("DefaultCluster");
        config.setBrokerIP1(LOOPBACK);
        config.setBrokerIP2(LOOPBACK);
        config.setNamesrvAddr(nameServer());
        // A busy machine is no reason to turn a send away.
        config.setBrokerFastFailureEnable(false);
        NettyServerConfig server = new NettyServerConfig();
        server.setListenPort(PORT);
        BrokerController controller = controller(config, server, new NettyClientConfig(), store);
        if (!controller.initialize()) {
            throw new IllegalStateException("BrokerController.initialize() refused " + directory);
        }
        return controller;
    }

    static String nameServer() {
        return LOOPBACK + ":" + NAME_SERVER_PORT;
    }

    /** Later versions take an AuthConfig as well, which may be missing. */
    private static BrokerController controller(Object... arguments) throws ReflectiveOperationException {
        Constructor<?> shortest = null;
        for (Constructor<?> each : BrokerController.class.getConstructors()) {
            Class<?>[] types = each.getParameterTypes();
            if (types.length >= arguments.length && types[1] == NettyServerConfig.class
                && (shortest == null || types.length < shortest.getParameterCount())) {
                shortest = each;
            }
        }
        if (shortest == null) {
            throw new IllegalStateException("BrokerController has no constructor of four parameters or more");
        }
        return (BrokerController) shortest.newInstance(Arrays.copyOf(arguments, shortest.getParameterCount()));
    }
}
