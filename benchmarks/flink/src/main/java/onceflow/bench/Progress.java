package onceflow.bench;

import java.io.IOException;
import java.io.PrintWriter;
import java.nio.file.Files;
import java.nio.file.Path;

/** A file of lines "seconds since the epoch, rows so far" of one subtask, one every 20 ms at most. */
final class Progress implements AutoCloseable {
  private static final long INTERVAL_NS = 20_000_000;

  private final PrintWriter lines;
  private long notedNs;

  Progress(String directory, String name, int subtask) throws IOException {
    lines = new PrintWriter(Files.newBufferedWriter(Path.of(directory, "progress-" + name + "-" + subtask)));
  }

  /** Writes a line, if the last one is old enough. */
  void note(long rows) {
    long nowNs = System.nanoTime();
    if (nowNs - notedNs >= INTERVAL_NS) {
      notedNs = nowNs;
      end(rows);
    }
  }

  /** Writes a line. */
  void end(long rows) {
    lines.println(System.currentTimeMillis() / 1e3 + " " + rows);
    lines.flush();
  }

  @Override
  public void close() {
    lines.close();
  }
}
