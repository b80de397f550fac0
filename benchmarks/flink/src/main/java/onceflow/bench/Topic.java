package onceflow.bench;

import org.apache.flink.api.common.serialization.DeserializationSchema;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.KafkaSourceBuilder;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;

/** The source of Kafka's records. */
final class Topic {
  private Topic() {}

  /** Reads a topic from its start. Committed records alone are read, as by ours. */
  static <T> KafkaSourceBuilder<T> read(String servers, String topic, DeserializationSchema<T> records) {
    return KafkaSource.<T>builder()
        .setBootstrapServers(servers)
        .setTopics(topic)
        .setGroupId(topic + "-job")
        .setStartingOffsets(OffsetsInitializer.earliest())
        .setProperty("isolation.level", "read_committed")
        .setValueOnlyDeserializer(records);
  }
}
