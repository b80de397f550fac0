package onceflow.bench;

import java.time.Duration;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.state.StateTtlConfig;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.api.java.tuple.Tuple6;

/** A key's sum and count so far, in one state, beside each payment. */
public final class Balance
    extends RichMapFunction<Tuple4<Long, String, Long, Long>, Tuple6<Long, String, Long, Long, Long, Long>> {
  private final boolean expires;
  private transient ValueState<Tuple2<Long, Long>> total;
  private transient Tuple6<Long, String, Long, Long, Long, Long> result;

  public Balance(boolean expires) {
    this.expires = expires;
  }

  @Override
  public void open(OpenContext context) {
    ValueStateDescriptor<Tuple2<Long, Long>> descriptor =
        new ValueStateDescriptor<>("total", Types.TUPLE(Types.LONG, Types.LONG));
    if (expires) {
      descriptor.enableTimeToLive(StateTtlConfig.newBuilder(Duration.ofHours(1)).build());
    }
    total = getRuntimeContext().getState(descriptor);
    result = new Tuple6<>();
  }

  @Override
  public Tuple6<Long, String, Long, Long, Long, Long> map(Tuple4<Long, String, Long, Long> payment) throws Exception {
    Tuple2<Long, Long> soFar = total.value();
    Tuple2<Long, Long> now =
        soFar == null ? Tuple2.of(payment.f2, 1L) : Tuple2.of(soFar.f0 + payment.f2, soFar.f1 + 1);
    total.update(now);
    result.setFields(payment.f0, payment.f1, payment.f2, payment.f3, now.f0, now.f1);
    return result;
  }
}
