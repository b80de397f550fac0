package onceflow.bench;

import java.util.concurrent.locks.LockSupport;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * The payments of onceflow's DatagenSource, number for number: id, account, amount, ts.
 *
 * <p>Split k of s makes those numbered k, k+s, k+2s, … from a sequence of numbers, chained to it. Not Flink's
 * DataGeneratorSource: that goes through its rate limiter, and the task's mailbox, for every record.
 */
final class Payments extends RichMapFunction<Long, Tuple4<Long, String, Long, Long>> {
  private static final long TS_FIRST = 1_700_000_000_000L;
  private static final long NUMBERS = Long.MAX_VALUE;
  private static final int ROWS_BETWEEN_NOTES = 64;

  private final String name;
  private final String directory;
  private final long mixedSeed;
  private final int accounts;
  private final int splits;
  private final long fastRows;
  private final double rowsPerSecond;
  private transient String[] names;
  private transient Progress progress;
  private transient int split;
  private transient long first;
  private transient long rows;
  private transient long slowSince;
  private transient Tuple4<Long, String, Long, Long> payment;

  private Payments(
      String name, String directory, long seed, int accounts, int splits, long fastRows, double rowsPerSecond) {
    this.name = name;
    this.directory = directory;
    this.mixedSeed = mixed(seed);
    this.accounts = accounts;
    this.splits = splits;
    this.fastRows = fastRows / splits;
    this.rowsPerSecond = rowsPerSecond / splits;
  }

  /** Payments of 100,000 accounts, as fast as they are taken. */
  static DataStream<Tuple4<Long, String, Long, Long>> stream(
      StreamExecutionEnvironment environment, String name, String directory, long seed) {
    int splits = environment.getParallelism();
    return environment
        .fromSequence(0, NUMBERS - 1)
        .map(new Payments(name, directory, seed, 100_000, splits, NUMBERS, 0));
  }

  /** The same with their event time. */
  static DataStream<Tuple4<Long, String, Long, Long>> timed(
      StreamExecutionEnvironment environment, String name, String directory, long seed) {
    return stream(environment, name, directory, seed)
        .assignTimestampsAndWatermarks(
            WatermarkStrategy.<Tuple4<Long, String, Long, Long>>forMonotonousTimestamps()
                .withTimestampAssigner((payment, before) -> payment.f3));
  }

  /** Payments of one account: {@code fastRows} as fast as they are taken, the others at a pace. */
  static DataStream<Tuple4<Long, String, Long, Long>> paced(
      StreamExecutionEnvironment environment, String directory, long fastRows, double rowsPerSecond) {
    int splits = environment.getParallelism();
    return environment
        .fromSequence(0, NUMBERS - 1)
        .map(new Payments("payments", directory, 0, 1, splits, fastRows, rowsPerSecond));
  }

  @Override
  public void open(OpenContext context) {
    names = new String[accounts];
    for (int account = 0; account < accounts; account++) {
      names[account] = String.format("acct-%06d", account);
    }
    payment = new Tuple4<>();
    first = -1;
  }

  @Override
  public Tuple4<Long, String, Long, Long> map(Long number) throws Exception {
    if (first < 0) {
      first = number;
      // Flink gives each reader a range of the numbers, of the same length.
      split = (int) Math.round((double) number / NUMBERS * splits);
      progress = new Progress(directory, name, split);
    }
    if (rows >= fastRows) {
      awaitPace();
    }
    rows = number - first + 1;
    if (rows % ROWS_BETWEEN_NOTES == 0) {
      progress.note(rows);
    }
    long id = (number - first) * splits + split;
    long word = mixed(id ^ mixedSeed);
    payment.f0 = id;
    payment.f1 = names[(int) Long.remainderUnsigned(word, accounts)];
    payment.f2 = Long.remainderUnsigned(mixed(word), 100_000) - 5_000;
    payment.f3 = TS_FIRST + id;
    return payment;
  }

  private void awaitPace() {
    slowSince = slowSince == 0 ? System.nanoTime() : slowSince;
    long dueNs = slowSince + (long) ((rows - fastRows) / rowsPerSecond * 1e9);
    for (long nowNs = System.nanoTime(); nowNs < dueNs; nowNs = System.nanoTime()) {
      LockSupport.parkNanos(dueNs - nowNs);
    }
  }

  /** SplitMix64's output function. */
  private static long mixed(long word) {
    word += 0x9E3779B97F4A7C15L;
    word = (word ^ (word >>> 30)) * 0xBF58476D1CE4E5B9L;
    word = (word ^ (word >>> 27)) * 0x94D049BB133111EBL;
    return word ^ (word >>> 31);
  }

  @Override
  public void close() {
    if (progress != null) {
      progress.end(rows);
      progress.close();
    }
  }
}
