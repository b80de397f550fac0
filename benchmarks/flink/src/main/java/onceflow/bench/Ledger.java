package onceflow.bench;

import java.io.BufferedReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import org.apache.flink.api.common.JobID;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.runtime.jobgraph.JobGraph;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * Flink's side of benchmarks/beside_flink/databases.py: all payments of a topic, each account's balance and count
 * after each of them, into a table, exactly once.
 *
 * <p>Lines on stdin say what to do: "run DIRECTORY BACKEND SERVERS TOPIC JDBC_URL TABLE". Such a line is answered
 * with "reading" at the first record, and with "stopped" once all is committed; how many seconds lay between the
 * first record and the last commit is then in the file "seconds" of the directory. What fails is answered with "failed: …".
 */
public final class Ledger {
  private static final long LOOK_INTERVAL_MS = 50;

  private Ledger() {}

  public static void main(String[] arguments) throws Exception {
    Main.serve(Ledger::run);
  }

  private static void run(MiniCluster flink, String[] words, BufferedReader lines) throws Exception {
    JobGraph graph = graph(words);
    JobID job = graph.getJobID();
    RunClock clock = RunClock.renew();
    flink.submitJob(graph).get();
    boolean isReading = false;
    while (!isReading && runs(flink, job)) {
      isReading = clock.awaitReading(LOOK_INTERVAL_MS);
    }
    if (isReading) {
      System.out.println("reading");
    }
    Main.awaitSuccess(flink, job);
    Files.writeString(Path.of(words[1], "seconds"), Double.toString(clock.seconds()));
  }

  private static boolean runs(MiniCluster flink, JobID job) throws Exception {
    return !flink.getJobStatus(job).get().isGloballyTerminalState();
  }

  private static JobGraph graph(String[] words) {
    StreamExecutionEnvironment environment =
        JobSettings.environment(JobSettings.of(words[1], words[2], Duration.ofSeconds(1)));
    KafkaSource<Tuple4<Long, String, Long, Long>> source =
        Topic.read(words[3], words[4], new PaymentRecords())
            .setBounded(OffsetsInitializer.latest())
            // Quicker here than the default, 500.
            .setProperty("max.poll.records", "5000")
            .build();
    environment
        .fromSource(source, WatermarkStrategy.noWatermarks(), "payments")
        .uid("payments")
        .keyBy(payment -> payment.f1)
        .map(new Balance(false))
        .uid("balance")
        .addSink(
            Inserts.into(
                words[5],
                words[6],
                "id, account, amount, ts, balance, n",
                (statement, row) -> {
                  statement.setLong(1, row.f0);
                  statement.setString(2, row.f1);
                  statement.setLong(3, row.f2);
                  statement.setLong(4, row.f3);
                  statement.setLong(5, row.f4);
                  statement.setLong(6, row.f5);
                }))
        .uid("ledger");
    return environment.getStreamGraph().getJobGraph();
  }
}
