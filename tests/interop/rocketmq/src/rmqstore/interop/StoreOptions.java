package rmqstore.interop;

import java.io.File;
import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Properties;

import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** The command line of the tool: directory, geometry, and what is left over as arguments of the command. */
final class StoreOptions {
    /** Options with a value, and the RocketMQ option that each one sets. */
    private static final Map<String, String> VALUES = Map.of(
        "--segment", "mappedFileSizeCommitLog",
        "--queue", "mappedFileSizeConsumeQueue",
        "--ext-file", "mappedFileSizeConsumeQueueExt",
        "--batch-queue", "mapperFileSizeBatchConsumeQueue",
        "--slots", "maxHashSlotNum",
        "--entries", "maxIndexNum",
        "--delay", "messageDelayLevel");
    /** Switches, and the RocketMQ options that each one turns on. */
    private static final Map<String, List<String>> SWITCHES = Map.of(
        "--prop-crc", List.of("enabledAppendPropCRC"),
        "--ext", List.of("enableConsumeQueueExt"),
        "--compaction", List.of("enableCompaction"),
        "--lmq", List.of("enableLmq", "enableMultiDispatch"));

    final String directory;
    final MessageStoreConfig config = new MessageStoreConfig();
    final List<String> batchTopics = new ArrayList<>();
    final List<String> arguments = new ArrayList<>();
    /** Options of BrokerConfig; only BrokerTool looks at them. */
    final Properties brokerSettings = new Properties();
    boolean kill;

    StoreOptions(List<String> words) {
        if (words.isEmpty()) {
            throw new UsageException("the store directory is missing");
        }
        directory = words.get(0);
        if (!new File(directory).isDirectory()) {
            throw new UsageException("not a directory: " + directory);
        }
        Properties properties = new Properties();
        properties.setProperty("storePathRootDir", directory);
        properties.setProperty("storePathCommitLog", directory + File.separator + "commitlog");
        // A test store must not be cleaned under the test, whatever the disk, the hour or the age of its files.
        properties.setProperty("diskMaxUsedSpaceRatio", "95");
        properties.setProperty("cleanFileForciblyEnable", "false");
        properties.setProperty("fileReservedTime", "1000000");
        properties.setProperty("timerWheelEnable", "false");
        properties.setProperty("enableCompaction", "false");
        properties.setProperty("haListenPort", "0");
        for (int i = 1; i < words.size(); i++) {
            String word = words.get(i);
            if (VALUES.containsKey(word)) {
                properties.setProperty(VALUES.get(word), value(words, ++i, word));
            } else if (SWITCHES.containsKey(word)) {
                SWITCHES.get(word).forEach(name -> properties.setProperty(name, "true"));
            } else if (word.equals("--set")) {
                String[] pair = pair(words, ++i, word);
                properties.setProperty(pair[0], pair[1]);
            } else if (word.equals("--broker-set")) {
                String[] pair = pair(words, ++i, word);
                brokerSettings.setProperty(pair[0], pair[1]);
            } else if (word.equals("--batch-topic")) {
                batchTopics.add(value(words, ++i, word));
            } else if (word.equals("--kill")) {
                kill = true;
            } else if (word.startsWith("--")) {
                throw new UsageException("unknown option " + word);
            } else {
                arguments.add(word);
            }
        }
        for (String name : properties.stringPropertyNames()) {
            requireOption(MessageStoreConfig.class, name);
        }
        MixAll.properties2Object(properties, config);
    }

    /** RocketMQ passes over names that it does not know; a misspelt geometry must not go unnoticed. */
    static void requireOption(Class<?> config, String name) {
        String setter = "set" + Character.toUpperCase(name.charAt(0)) + name.substring(1);
        for (Method method : config.getMethods()) {
            if (method.getName().equals(setter)) {
                return;
            }
        }
        throw new UsageException(config.getSimpleName() + " has no option " + name);
    }

    private static String[] pair(List<String> words, int i, String option) {
        String[] pair = value(words, i, option).split("=", 2);
        if (pair.length != 2) {
            throw new UsageException(option + " takes name=value, got " + pair[0]);
        }
        return pair;
    }

    private static String value(List<String> words, int i, String option) {
        if (i >= words.size()) {
            throw new UsageException(option + " needs a value");
        }
        return words.get(i);
    }

    /** A command line that cannot be understood. */
    static final class UsageException extends RuntimeException {
        UsageException(String message) {
            super(message);
        }
    }
}
