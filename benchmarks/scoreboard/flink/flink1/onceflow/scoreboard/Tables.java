package onceflow.scoreboard;

import org.apache.flink.connector.jdbc.JdbcConnectionOptions.JdbcConnectionOptionsBuilder;
import org.apache.flink.connector.jdbc.JdbcExactlyOnceOptions;
import org.apache.flink.connector.jdbc.JdbcExecutionOptions;
import org.apache.flink.connector.jdbc.JdbcSink;
import org.apache.flink.connector.jdbc.JdbcStatementBuilder;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.util.function.SerializableSupplier;
import javax.sql.XADataSource;
import org.postgresql.xa.PGXADataSource;

/**
 * The tables, written by the sinks of Flink 1.20's JDBC connector: "append" and "upsert" by JdbcSink.sink, "xa" by
 * JdbcSink.exactlyOnceSink, "new-xa" by the newer JdbcSink that replaces both.
 */
final class Tables {
  private final String way;
  private final String url;

  Tables(String way, String url) {
    this.way = way;
    this.url = url;
  }

  /** Writes by the sink of the way. */
  <T> void write(DataStream<T> rows, String statement, String uid, JdbcStatementBuilder<T> values) {
    write(rows, statement, uid, values, way);
  }

  /**
   * Writes at least once, whatever the way: an upsert by key needs no more. In XA a row that a prepared transaction has
   * locked would block the next upsert of the same key, and with it the task that commits the prepared transaction.
   */
  <T> void upsert(DataStream<T> rows, String statement, String uid, JdbcStatementBuilder<T> values) {
    write(rows, statement, uid, values, "upsert");
  }

  private <T> void write(
      DataStream<T> rows, String statement, String uid, JdbcStatementBuilder<T> values, String way) {
    boolean isXa = way.endsWith("xa");
    JdbcExecutionOptions execution =
        JdbcExecutionOptions.builder()
            .withBatchSize(1000)
            .withBatchIntervalMs(isXa ? 0 : 200)
            // With XA the documentation asks for no retries, and rows become visible at checkpoints alone.
            .withMaxRetries(isXa ? 0 : 5)
            .build();
    // Postgres allows one transaction for each connection.
    JdbcExactlyOnceOptions xa = JdbcExactlyOnceOptions.builder().withTransactionPerConnection(true).build();
    switch (way) {
      case "append", "upsert" -> rows.addSink(JdbcSink.sink(statement, values, execution,
              new JdbcConnectionOptionsBuilder().withUrl(url).withDriverName("org.postgresql.Driver").build()))
          .uid(uid);
      case "xa" -> rows.addSink(JdbcSink.exactlyOnceSink(statement, values, execution, xa, database(url))).uid(uid);
      case "new-xa" -> rows.sinkTo(
              org.apache.flink.connector.jdbc.core.datastream.sink.JdbcSink.<T>builder()
                  .withQueryStatement(statement, values)
                  .withExecutionOptions(execution)
                  .buildExactlyOnce(xa, database(url)))
          .uid(uid);
      default -> throw new IllegalArgumentException("no such way: " + way);
    }
  }

  private static SerializableSupplier<XADataSource> database(String url) {
    return () -> {
      PGXADataSource source = new PGXADataSource();
      source.setUrl(url);
      return source;
    };
  }
}
