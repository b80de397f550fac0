package onceflow.bench;

import com.fasterxml.jackson.core.JsonParser;
import java.io.IOException;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple4;

/** Reads {"id": n, "account": "…", "amount": n, "ts": n}; notes when the first one is there. */
public final class PaymentRecords extends JsonRecords<Tuple4<Long, String, Long, Long>> {
  private transient boolean isReading;

  public PaymentRecords() {
    super(Types.TUPLE(Types.LONG, Types.STRING, Types.LONG, Types.LONG));
  }

  @Override
  Tuple4<Long, String, Long, Long> create() {
    if (!isReading) {
      isReading = true;
      RunClock.current().noteReading();
    }
    return new Tuple4<>();
  }

  @Override
  void set(Tuple4<Long, String, Long, Long> record, String field, JsonParser value) throws IOException {
    switch (field) {
      case "id" -> record.f0 = value.getLongValue();
      case "account" -> record.f1 = value.getText();
      case "amount" -> record.f2 = value.getLongValue();
      case "ts" -> record.f3 = value.getLongValue();
      default -> throw unknown(field);
    }
  }
}
