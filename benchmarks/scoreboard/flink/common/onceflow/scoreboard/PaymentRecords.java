package onceflow.scoreboard;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import java.io.IOException;
import org.apache.flink.api.common.serialization.AbstractDeserializationSchema;

/** Decodes the JSON of a payment. */
public final class PaymentRecords extends AbstractDeserializationSchema<Payment> {
  private static final long serialVersionUID = 1L;
  private transient JsonFactory json;

  public PaymentRecords() {
    super(Payment.class);
  }

  @Override
  public void open(InitializationContext context) {
    json = new JsonFactory();
  }

  @Override
  public Payment deserialize(byte[] message) throws IOException {
    Payment payment = new Payment();
    try (JsonParser parser = json.createParser(message)) {
      parser.nextToken();
      while (parser.nextToken() == JsonToken.FIELD_NAME) {
        String field = parser.currentName();
        parser.nextToken();
        switch (field) {
          case "id" -> payment.id = parser.getLongValue();
          case "account" -> payment.account = parser.getText();
          case "amount" -> payment.amount = parser.getLongValue();
          case "ts" -> payment.ts = parser.getLongValue();
          default -> throw new IOException("a record has the unknown field " + field);
        }
      }
    }
    return payment;
  }
}
