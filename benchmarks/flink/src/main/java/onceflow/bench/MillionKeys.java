package onceflow.bench;

import java.util.SplittableRandom;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.PrimitiveArrayTypeInfo;
import org.apache.flink.api.java.tuple.Tuple1;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/** 1,000,000 keys with 100 random bytes each; once all are there, 10,000 a second get others. */
final class MillionKeys {
  static final int KEYS = 1_000_000;
  private static final long CHANGED_PER_SECOND = 10_000;
  // Prime to the number of keys: so many changes in a row are as many keys.
  private static final long STEP = 7_919;

  private MillionKeys() {}

  static DataStream<Tuple1<Long>> of(StreamExecutionEnvironment environment, String directory) {
    return Payments.paced(environment, directory, KEYS, CHANGED_PER_SECOND)
        .keyBy(payment -> keyOf(payment.f0))
        .map(new NewBytes());
  }

  private static long keyOf(long id) {
    return id < KEYS ? id : id * STEP % KEYS;
  }

  private static final class NewBytes extends RichMapFunction<Tuple4<Long, String, Long, Long>, Tuple1<Long>> {
    private transient ValueState<byte[]> payload;
    private transient SplittableRandom random;

    @Override
    public void open(OpenContext context) {
      payload =
          getRuntimeContext()
              .getState(
                  new ValueStateDescriptor<>("payload", PrimitiveArrayTypeInfo.BYTE_PRIMITIVE_ARRAY_TYPE_INFO));
      random = new SplittableRandom();
    }

    @Override
    public Tuple1<Long> map(Tuple4<Long, String, Long, Long> payment) throws Exception {
      byte[] bytes = new byte[100];
      random.nextBytes(bytes);
      payload.update(bytes);
      return Tuple1.of(keyOf(payment.f0));
    }
  }
}
