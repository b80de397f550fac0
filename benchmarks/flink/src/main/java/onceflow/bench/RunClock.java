package onceflow.bench;

import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;

/** When the job that runs in this JVM, which has one at a time, read its first record, and last committed rows. */
final class RunClock {
  private static volatile RunClock current = new RunClock();

  private final CountDownLatch reading = new CountDownLatch(1);
  private final AtomicLong readingNs = new AtomicLong(Long.MAX_VALUE);
  private final AtomicLong committedNs = new AtomicLong(Long.MIN_VALUE);

  private RunClock() {}

  /** Returns the clock of the job that is started next. */
  static RunClock renew() {
    current = new RunClock();
    return current;
  }

  static RunClock current() {
    return current;
  }

  void noteReading() {
    readingNs.accumulateAndGet(System.nanoTime(), Math::min);
    reading.countDown();
  }

  void noteCommit() {
    committedNs.accumulateAndGet(System.nanoTime(), Math::max);
  }

  /** Whether a first record has been read, after that many milliseconds at most. */
  boolean awaitReading(long timeoutMs) throws InterruptedException {
    return reading.await(timeoutMs, TimeUnit.MILLISECONDS);
  }

  /** Returns the seconds from the first record to the last commit. */
  double seconds() {
    return (committedNs.get() - readingNs.get()) / 1e9;
  }
}
