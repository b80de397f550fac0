package onceflow.scoreboard;

import org.apache.flink.connector.jdbc.JdbcConnectionOptions.JdbcConnectionOptionsBuilder;
import org.apache.flink.connector.jdbc.JdbcExactlyOnceOptions;
import org.apache.flink.connector.jdbc.JdbcExecutionOptions;
import org.apache.flink.connector.jdbc.JdbcStatementBuilder;
import org.apache.flink.connector.jdbc.core.datastream.sink.JdbcSink;
import org.apache.flink.connector.jdbc.core.datastream.sink.JdbcSinkBuilder;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.postgresql.xa.PGXADataSource;

/** The tables, written by the sink of Flink 2's JDBC connector: "append", "upsert" and "xa". */
final class Tables {
  private final String way;
  private final String url;

  Tables(String way, String url) {
    this.way = way;
    this.url = url;
  }

  /** Writes by the sink of the way. */
  <T> void write(DataStream<T> rows, String statement, String uid, JdbcStatementBuilder<T> values) {
    write(rows, statement, uid, values, way.equals("xa"));
  }

  /**
   * Writes at least once, whatever the way: an upsert by key needs no more. In XA a row that a prepared transaction has
   * locked would block the next upsert of the same key, and with it the task that commits the prepared transaction.
   */
  <T> void upsert(DataStream<T> rows, String statement, String uid, JdbcStatementBuilder<T> values) {
    write(rows, statement, uid, values, false);
  }

  private <T> void write(
      DataStream<T> rows, String statement, String uid, JdbcStatementBuilder<T> values, boolean isXa) {
    JdbcSinkBuilder<T> builder =
        JdbcSink.<T>builder()
            .withQueryStatement(statement, values)
            .withExecutionOptions(
                JdbcExecutionOptions.builder()
                    .withBatchSize(1000)
                    .withBatchIntervalMs(isXa ? 0 : 200)
                    // With XA the documentation asks for no retries, and rows become visible at checkpoints alone.
                    .withMaxRetries(isXa ? 0 : 5)
                    .build());
    rows.sinkTo(isXa ? exactlyOnce(builder) : builder.buildAtLeastOnce(
            new JdbcConnectionOptionsBuilder().withUrl(url).withDriverName("org.postgresql.Driver").build()))
        .uid(uid);
  }

  private <T> JdbcSink<T> exactlyOnce(JdbcSinkBuilder<T> builder) {
    String database = url;
    return builder.buildExactlyOnce(
        JdbcExactlyOnceOptions.builder().withTransactionPerConnection(true).build(),
        () -> {
          PGXADataSource source = new PGXADataSource();
          source.setUrl(database);
          return source;
        });
  }
}
