package onceflow.bench;

import java.io.BufferedReader;
import java.time.Duration;
import org.apache.flink.api.common.JobID;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.runtime.executiongraph.AccessExecutionGraph;
import org.apache.flink.runtime.jobgraph.JobGraph;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.SinkFunction;

/**
 * Flink's side of benchmarks/latency.py: Kafka, a running balance by account, Kafka or Postgres, exactly once.
 *
 * <p>Lines on stdin say what to do: "run DIRECTORY INTERVAL_MS SERVERS TOPIC kafka TOPIC", or "… table JDBC_URL
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
    Duration interval = Duration.ofMillis(Long.parseLong(words[2]));
    StreamExecutionEnvironment environment = JobSettings.environment(JobSettings.of(words[1], "heap", interval));
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
      balances.addSink(tableSink(words[6], words[7])).uid("out");
    }
    return environment.getStreamGraph().getJobGraph();
  }

  /**
   * Reads with the consumer's defaults, which are the quickest for a row: a broker answers with the first record that
   * it has (fetch.min.bytes=1; fetch.max.wait.ms=500 is for topics without any), and a poll returns up to 500 records.
   */
  private static KafkaSource<Tuple3<String, Long, Long>> source(String servers, String topic) {
    return Topic.read(servers, topic, new SentRecords()).build();
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

  private static SinkFunction<Tuple4<String, Long, Long, Long>> tableSink(String url, String table) {
    return Inserts.into(
        url,
        table,
        "account, amount, sent_us, balance",
        (statement, row) -> {
          statement.setString(1, row.f0);
          statement.setLong(2, row.f1);
          statement.setLong(3, row.f2);
          statement.setLong(4, row.f3);
        });
  }
}
