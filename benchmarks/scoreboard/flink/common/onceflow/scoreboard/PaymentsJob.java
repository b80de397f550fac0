package onceflow.scoreboard;

import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.GlobalConfiguration;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.RemoteStreamEnvironment;

/**
 * Submits the job to a cluster: each payment into one table, the running total of each account into another.
 *
 * <p>Arguments: CONFIGURATION_DIRECTORY REST_PORT WAY SERVERS TOPIC JDBC_URL. WAY is one of the ways of {@link Tables}.
 */
public final class PaymentsJob {
  static final String INSERT = "INSERT INTO payments (id, account, amount, ts) VALUES (?, ?, ?, ?)";
  static final String UPSERT = INSERT
      + " ON CONFLICT (id) DO UPDATE SET account = EXCLUDED.account, amount = EXCLUDED.amount, ts = EXCLUDED.ts";
  static final String UPSERT_TOTAL = "INSERT INTO totals (account, total, n) VALUES (?, ?, ?)"
      + " ON CONFLICT (account) DO UPDATE SET total = EXCLUDED.total, n = EXCLUDED.n";

  private PaymentsJob() {}

  public static void main(String[] words) throws Exception {
    Configuration settings = GlobalConfiguration.loadConfiguration(words[0]);
    RemoteStreamEnvironment environment =
        new RemoteStreamEnvironment("127.0.0.1", Integer.parseInt(words[1]), settings);
    environment.setParallelism(2);
    KafkaSource<Payment> source =
        KafkaSource.<Payment>builder()
            .setBootstrapServers(words[3])
            .setTopics(words[4])
            .setGroupId(words[4] + "-job")
            .setStartingOffsets(OffsetsInitializer.earliest())
            .setProperty("isolation.level", "read_committed")
            .setValueOnlyDeserializer(new PaymentRecords())
            .build();
    DataStream<Payment> payments =
        environment.fromSource(source, WatermarkStrategy.noWatermarks(), "payments").uid("payments");
    DataStream<Total> totals = payments.keyBy(payment -> payment.account).map(new RunningTotal()).uid("total");
    Tables tables = new Tables(words[2], words[5]);
    tables.write(payments, words[2].equals("upsert") ? UPSERT : INSERT, "payments-table", (statement, payment) -> {
      statement.setLong(1, payment.id);
      statement.setString(2, payment.account);
      statement.setLong(3, payment.amount);
      statement.setLong(4, payment.ts);
    });
    tables.upsert(totals, UPSERT_TOTAL, "totals-table", (statement, total) -> {
      statement.setString(1, total.account);
      statement.setLong(2, total.total);
      statement.setLong(3, total.n);
    });
    environment.executeAsync("payments");
  }
}
