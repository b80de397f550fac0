package onceflow.bench;

import com.fasterxml.jackson.core.JsonEncoding;
import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonGenerator;
import java.nio.file.Path;
import java.util.Set;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.streaming.api.functions.sink.RichSinkFunction;
import org.apache.flink.types.Row;
import org.apache.flink.types.RowKind;

/** Writes changes of a table as lines of JSON to a file of its subtask. "_count" is 1 for a row, -1 for its removal. */
public final class ChangesSink extends RichSinkFunction<Row> {
  private static final Set<RowKind> REMOVALS = Set.of(RowKind.UPDATE_BEFORE, RowKind.DELETE);

  private final String directory;
  private transient JsonGenerator lines;

  public ChangesSink(String directory) {
    this.directory = directory;
  }

  @Override
  public void open(OpenContext context) throws Exception {
    int subtask = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
    Path path = Path.of(directory, "changes-" + subtask + ".json");
    JsonFactory json = new JsonFactory().setRootValueSeparator("\n");
    lines = json.createGenerator(path.toFile(), JsonEncoding.UTF8);
  }

  @Override
  public void invoke(Row row, Context context) throws Exception {
    lines.writeStartObject();
    lines.writeNumberField("_count", REMOVALS.contains(row.getKind()) ? -1 : 1);
    for (String name : row.getFieldNames(true)) {
      Object value = row.getField(name);
      lines.writeStringField(name, value == null ? null : value.toString());
    }
    lines.writeEndObject();
  }

  @Override
  public void close() throws Exception {
    if (lines != null) {
      lines.close();
    }
  }
}
