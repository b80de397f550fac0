import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.io.FileInputStream;
import java.lang.management.ManagementFactory;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.connect.source.SourceRecord;

/**
 * Reads a slot with Debezium's embedded engine, and drops the changes. Arguments: the engine's
 * properties in a file, the number of changes, and a timeout in seconds. Prints the seconds and the
 * CPU seconds from the start of the connector's task to the last change.
 */
public final class DebeziumReader {
  private static final CountDownLatch DONE = new CountDownLatch(1);
  private static volatile String failure = "";
  private static volatile long beganNs;
  private static volatile long cpuBeganNs;
  private static volatile long left;

  public static void main(String[] arguments) throws Exception {
    Properties settings = new Properties();
    try (FileInputStream file = new FileInputStream(arguments[0])) {
      settings.load(file);
    }
    left = Long.parseLong(arguments[1]);
    DebeziumEngine<RecordChangeEvent<SourceRecord>> engine =
        DebeziumEngine.create(ChangeEventFormat.of(Connect.class))
            .using(settings)
            .using(
                new DebeziumEngine.ConnectorCallback() {
                  @Override
                  public void taskStarted() {
                    cpuBeganNs = cpuNs();
                    beganNs = System.nanoTime();
                  }
                })
            .using(
                (success, message, error) -> {
                  failure = success ? "" : message + ": " + error;
                  DONE.countDown();
                })
            .notifying(DebeziumReader::drop)
            .build();
    Thread thread = new Thread(engine);
    thread.setDaemon(true);
    thread.start();
    DONE.await(Long.parseLong(arguments[2]), TimeUnit.SECONDS);
    double seconds = (System.nanoTime() - beganNs) / 1e9;
    double cpuSeconds = (cpuNs() - cpuBeganNs) / 1e9;
    if (left > 0) {
      System.err.println(left + " changes are left: " + failure);
      Runtime.getRuntime().halt(1);
    }
    System.out.println("{\"seconds\": " + seconds + ", \"cpu_s\": " + cpuSeconds + "}");
    System.out.flush();
    Runtime.getRuntime().halt(0);
  }

  private static void drop(
      List<RecordChangeEvent<SourceRecord>> changes,
      DebeziumEngine.RecordCommitter<RecordChangeEvent<SourceRecord>> committer)
      throws InterruptedException {
    for (RecordChangeEvent<SourceRecord> change : changes) {
      committer.markProcessed(change);
    }
    committer.markBatchFinished();
    left -= changes.size();
    if (left <= 0) {
      DONE.countDown();
    }
  }

  private static long cpuNs() {
    return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean())
        .getProcessCpuTime();
  }
}
