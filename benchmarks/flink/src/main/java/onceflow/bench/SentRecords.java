package onceflow.bench;

import com.fasterxml.jackson.core.JsonParser;
import java.io.IOException;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple3;

/** Reads {"account": "…", "amount": n, "sent_us": n}. */
public final class SentRecords extends JsonRecords<Tuple3<String, Long, Long>> {
  public SentRecords() {
    super(Types.TUPLE(Types.STRING, Types.LONG, Types.LONG));
  }

  @Override
  Tuple3<String, Long, Long> create() {
    return new Tuple3<>();
  }

  @Override
  void set(Tuple3<String, Long, Long> record, String field, JsonParser value) throws IOException {
    switch (field) {
      case "account" -> record.f0 = value.getText();
      case "amount" -> record.f1 = value.getLongValue();
      case "sent_us" -> record.f2 = value.getLongValue();
      default -> throw unknown(field);
    }
  }
}
