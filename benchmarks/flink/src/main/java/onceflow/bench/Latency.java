package onceflow.bench;

import java.io.BufferedReader;
import java.time.Duration;
import org.apache.flink.api.common.JobID;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.configuration.CheckpointingOptions;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.PipelineOptions;
import org.apache.flink.configuration.RestartStrategyOptions;
import org.apache.flink.configuration.StateBackendOptions;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.jdbc.JdbcExactlyOnceOptions;
import org.apache.flink.connector.jdbc.JdbcExecutionOptions;
import org.apache.flink.connector.jdbc.JdbcSink;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.core.execution.CheckpointingMode;
import org.apache.flink.runtime.executiongraph.AccessExecutionGraph;
import org.apache.flink.runtime.jobgraph.JobGraph;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.SinkFunction;
import org.postgresql.xa.PGXADataSource;

/**
 * Flink's side of benchmarks/latency.py: Kafka, a running balance by account, Kafka or Postgres, exactly once.
 *
 * <p>Lines on stdin say what to do: "run DIRECTORY INTERVAL_MS SERVERS TOPIC kafka TOPIC", or "… postgres JDBC_URL
 * TABLE"; then "checkpoints", which is answered with how many are completed; and "stop", which is answered with
 * "stopped". What fails is answered with "failed: …".
 */
public final class Latency {
  // Below transaction.max.timeout.ms of a broker, 15 minutes by default. The sink's own default is an hour.
  private static final String TRANSACTION_TIMEOUT_MS = "600000";

  private Latency() {}

  public static void main(String[] arguments) throws Exception {
    Main.serve(Latency::run);
  }

  private static void run(MiniCluster flink, String[] words, BufferedReader lines) throws Exception {
    String directory = words[1];
    JobGraph graph = graph(words);
    JobID job = graph.getJobID();
    flink.submitJob(graph).get();
    for (String line = lines.readLine(); "checkpoints".equals(line); line = lines.readLine()) {
      System.out.println(completed(flink, job));
    }
    Main.stop(flink, job, directory);
  }

  private static long completed(MiniCluster flink, JobID job) throws Exception {
    AccessExecutionGraph graph = flink.getExecutionGraph(job).get();
    if (graph.getFailureInfo() != null) {
      throw new IllegalStateException(graph.getFailureInfo().getExceptionAsString());
    }
    return graph.getCheckpointStatsSnapshot().getCounts().getNumberOfCompletedCheckpoints();
  }

  private static JobGraph graph(String[] words) {
    StreamExecutionEnvironment environment =
        StreamExecutionEnvironment.getExecutionEnvironment(settings(words[1], Long.parseLong(words[2])));
    environment.setParallelism(Main.PARALLELISM);
    environment.setMaxParallelism(128);
    DataStream<Tuple4<String, Long, Long, Long>> balances =
        environment
            .fromSource(source(words[3], words[4]), WatermarkStrategy.noWatermarks(), "sent")
            .uid("sent")
            .keyBy(record -> record.f0)
            .map(new AccountBalance())
            .uid("balance");
    if (words[5].equals("kafka")) {
      balances.sinkTo(kafkaSink(words[3], words[6])).uid("out");
    } else {
      balances.addSink(postgresSink(words[6], words[7])).uid("out");
    }
    return environment.getStreamGraph().getJobGraph();
  }

  /** All else is Flink's default: aligned checkpoints one at a time, and a buffer timeout of 100 ms. */
  private static Configuration settings(String directory, long intervalMs) {
    Configuration settings = new Configuration();
    settings.set(CheckpointingOptions.CHECKPOINTING_INTERVAL, Duration.ofMillis(intervalMs));
    settings.set(CheckpointingOptions.CHECKPOINTING_CONSISTENCY_MODE, CheckpointingMode.EXACTLY_ONCE);
    settings.set(CheckpointingOptions.MIN_PAUSE_BETWEEN_CHECKPOINTS, Duration.ZERO);
    settings.set(CheckpointingOptions.CHECKPOINT_STORAGE, "filesystem");
    settings.set(CheckpointingOptions.CHECKPOINTS_DIRECTORY, "file://" + directory + "/checkpoints");
    settings.set(StateBackendOptions.STATE_BACKEND, "hashmap");
    settings.set(PipelineOptions.OBJECT_REUSE, true);
    settings.set(PipelineOptions.GENERIC_TYPES, false);
    settings.set(RestartStrategyOptions.RESTART_STRATEGY, "none");
    return settings;
  }

  /**
   * Reads from the start with the consumer's defaults, which are the quickest for a row: a broker answers with the
   * first record that it has (fetch.min.bytes=1; fetch.max.wait.ms=500 is for topics without any), and a poll
   * returns up to 500 records. Committed records alone are read, as by ours.
   */
  private static KafkaSource<Tuple3<String, Long, Long>> source(
      String servers, String topic) {
    return KafkaSource.<Tuple3<String, Long, Long>>builder()
        .setBootstrapServers(servers)
        .setTopics(topic)
        .setGroupId(topic + "-job")
        .setStartingOffsets(OffsetsInitializer.earliest())
        .setProperty("isolation.level", "read_committed")
        .setValueOnlyDeserializer(new SentRecords())
        .build();
  }

  /** Sends with the producer's defaults: linger.ms=0, batches of 16 kB. */
  private static KafkaSink<Tuple4<String, Long, Long, Long>> kafkaSink(String servers, String topic) {
    return KafkaSink.<Tuple4<String, Long, Long, Long>>builder()
        .setBootstrapServers(servers)
        .setRecordSerializer(
            KafkaRecordSerializationSchema.<Tuple4<String, Long, Long, Long>>builder()
                .setTopic(topic)
                .setValueSerializationSchema(new BalanceRecords())
                .build())
        .setDeliveryGuarantee(DeliveryGuarantee.EXACTLY_ONCE)
        .setTransactionalIdPrefix(topic)
        .setProperty("transaction.timeout.ms", TRANSACTION_TIMEOUT_MS)
        .build();
  }

  /**
   * Inserts in XA transactions. Not the newer sink of the same name in `core.datastream`: its writer commits what it
   * has prepared as it takes its snapshot, before the checkpoint is complete.
   */
  private static SinkFunction<Tuple4<String, Long, Long, Long>> postgresSink(String url, String table) {
    return JdbcSink.exactlyOnceSink(
        "INSERT INTO " + table + " (account, amount, sent_us, balance) VALUES (?, ?, ?, ?)",
        (statement, row) -> {
          statement.setString(1, row.f0);
          statement.setLong(2, row.f1);
          statement.setLong(3, row.f2);
          statement.setLong(4, row.f3);
        },
        // A failed statement ends an XA transaction, so none is tried again.
        JdbcExecutionOptions.builder().withMaxRetries(0).build(),
        // A connection of Postgres has one transaction at a time, prepared ones aside.
        JdbcExactlyOnceOptions.builder().withTransactionPerConnection(true).build(),
        () -> {
          PGXADataSource source = new PGXADataSource();
          source.setUrl(url);
          source.setReWriteBatchedInserts(true);
          return source;
        });
  }
}
