package onceflow.bench;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonGenerator;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import org.apache.flink.api.common.serialization.SerializationSchema;
import org.apache.flink.api.java.tuple.Tuple4;

/** Writes {"account": "…", "amount": n, "sent_us": n, "balance": n}. */
public final class BalanceRecords implements SerializationSchema<Tuple4<String, Long, Long, Long>> {
  private transient JsonFactory json;
  private transient ByteArrayOutputStream bytes;

  @Override
  public void open(InitializationContext context) {
    json = new JsonFactory();
    bytes = new ByteArrayOutputStream();
  }

  @Override
  public byte[] serialize(Tuple4<String, Long, Long, Long> row) {
    bytes.reset();
    try (JsonGenerator generator = json.createGenerator(bytes)) {
      generator.writeStartObject();
      generator.writeStringField("account", row.f0);
      generator.writeNumberField("amount", row.f1);
      generator.writeNumberField("sent_us", row.f2);
      generator.writeNumberField("balance", row.f3);
      generator.writeEndObject();
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
    return bytes.toByteArray();
  }
}
