package onceflow.bench;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import java.io.IOException;
import org.apache.flink.api.common.serialization.AbstractDeserializationSchema;
import org.apache.flink.api.common.typeinfo.TypeInformation;

/** Reads JSON objects of numbers and texts, by Jackson's parser of tokens, its quickest. */
abstract class JsonRecords<T> extends AbstractDeserializationSchema<T> {
  private transient JsonFactory json;

  JsonRecords(TypeInformation<T> type) {
    super(type);
  }

  abstract T create();

  /** Takes the value of a field, at which the parser is. */
  abstract void set(T record, String field, JsonParser value) throws IOException;

  static IOException unknown(String field) {
    return new IOException("a record has the unknown field " + field);
  }

  @Override
  public void open(InitializationContext context) {
    json = new JsonFactory();
  }

  @Override
  public T deserialize(byte[] message) throws IOException {
    T record = create();
    try (JsonParser parser = json.createParser(message)) {
      parser.nextToken();
      while (parser.nextToken() == JsonToken.FIELD_NAME) {
        String field = parser.getCurrentName();
        parser.nextToken();
        set(record, field, parser);
      }
    }
    return record;
  }
}
