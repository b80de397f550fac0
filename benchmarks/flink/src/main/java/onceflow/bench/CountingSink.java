package onceflow.bench;

import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.streaming.api.functions.sink.RichSinkFunction;

/** Throws rows away; leaves how many there were in a file of its subtask. */
public final class CountingSink<T> extends RichSinkFunction<T> {
  private final String directory;
  private transient long rows;

  public CountingSink(String directory) {
    this.directory = directory;
  }

  @Override
  public void open(OpenContext context) {
    rows = 0;
  }

  @Override
  public void invoke(T row, Context context) {
    rows++;
  }

  @Override
  public void close() throws Exception {
    int subtask = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
    Files.writeString(Path.of(directory, "rows-" + subtask), Long.toString(rows));
  }
}
