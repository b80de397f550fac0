package onceflow.bench;

import com.mysql.cj.jdbc.MysqlXADataSource;
import java.sql.SQLException;
import javax.sql.XADataSource;
import org.apache.flink.connector.jdbc.JdbcExactlyOnceOptions;
import org.apache.flink.connector.jdbc.JdbcExecutionOptions;
import org.apache.flink.connector.jdbc.JdbcStatementBuilder;
import org.apache.flink.connector.jdbc.xa.JdbcXaSinkFunction;
import org.apache.flink.connector.jdbc.xa.XaFacade;
import org.apache.flink.util.function.SerializableSupplier;
import org.mariadb.jdbc.MariaDbDataSource;
import org.postgresql.xa.PGXADataSource;

/**
 * What JdbcSink.exactlyOnceSink returns, an insert in XA transactions, and notes of its commits.
 *
 * <p>Not the newer sink of the same name in `core.datastream`: its writer commits what it has prepared as it takes
 * its snapshot, before the checkpoint is complete.
 */
final class Inserts<T> extends JdbcXaSinkFunction<T> {
  private static final long serialVersionUID = 1L;
  // As good as 5,000 for Postgres and MariaDB, and better for MySQL.
  private static final int BATCH_ROWS = 1_000;
  // Without TLS, as all connections here. maxPerformance asks the server less between statements.
  private static final String MYSQL_OPTIONS =
      "&rewriteBatchedStatements=true&useConfigs=maxPerformance&sslMode=DISABLED&allowPublicKeyRetrieval=true";
  // Sends a batch as one binary statement, which takes the server half of what one of texts does.
  private static final String MARIADB_OPTIONS = "&useBulkStmts=true";
  // Of Postgres, MySQL and MariaDB a connection has one transaction at a time, prepared ones aside.
  private static final JdbcExactlyOnceOptions OPTIONS =
      JdbcExactlyOnceOptions.builder().withTransactionPerConnection(true).build();

  private Inserts(String statement, JdbcStatementBuilder<T> values, SerializableSupplier<XADataSource> database) {
    super(
        statement,
        values,
        XaFacade.fromXaDataSourceSupplier(database, OPTIONS.getTimeoutSec(), OPTIONS.isTransactionPerConnection()),
        // A failed statement ends an XA transaction, so none is tried again.
        JdbcExecutionOptions.builder().withMaxRetries(0).withBatchSize(BATCH_ROWS).build(),
        OPTIONS);
  }

  /** Returns inserts into {@code table} of the database at a JDBC URL, whose user it names. */
  static <T> Inserts<T> into(String url, String table, String columns, JdbcStatementBuilder<T> values) {
    String marks = columns.replaceAll("\\w+", "?");
    return new Inserts<>("INSERT INTO " + table + " (" + columns + ") VALUES (" + marks + ")", values, source(url));
  }

  /** Returns the driver's, set to send a batch of rows as few statements. */
  private static SerializableSupplier<XADataSource> source(String url) {
    switch (url.split(":")[1]) {
      case "postgresql":
        return () -> {
          PGXADataSource source = new PGXADataSource();
          source.setUrl(url);
          source.setReWriteBatchedInserts(true);
          return source;
        };
      case "mysql":
        return () -> {
          MysqlXADataSource source = new MysqlXADataSource();
          source.setUrl(url + MYSQL_OPTIONS);
          return source;
        };
      case "mariadb":
        return () -> {
          try {
            return new MariaDbDataSource(url + MARIADB_OPTIONS);
          } catch (SQLException error) {
            throw new IllegalArgumentException(error);
          }
        };
      default:
        throw new IllegalArgumentException("no driver for " + url);
    }
  }

  @Override
  public void notifyCheckpointComplete(long checkpoint) {
    super.notifyCheckpointComplete(checkpoint);
    RunClock.current().noteCommit();
  }
}
