package onceflow.bench;

import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.api.java.tuple.Tuple6;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;

/** The same in two states, and a timer that never comes for each of the first payments. */
public final class BalanceWithTimers
    extends KeyedProcessFunction<
        String, Tuple4<Long, String, Long, Long>, Tuple6<Long, String, Long, Long, Long, Long>> {
  private static final long FAR_MS = 1L << 60;

  private final long timers;
  private transient ValueState<Long> balance;
  private transient ValueState<Long> payments;
  private transient Tuple6<Long, String, Long, Long, Long, Long> result;

  public BalanceWithTimers(long timers) {
    this.timers = timers;
  }

  @Override
  public void open(OpenContext context) {
    balance = getRuntimeContext().getState(new ValueStateDescriptor<>("balance", Types.LONG));
    payments = getRuntimeContext().getState(new ValueStateDescriptor<>("payments", Types.LONG));
    result = new Tuple6<>();
  }

  @Override
  public void processElement(
      Tuple4<Long, String, Long, Long> payment,
      Context context,
      Collector<Tuple6<Long, String, Long, Long, Long, Long>> out)
      throws Exception {
    if (payment.f0 < timers) {
      context.timerService().registerEventTimeTimer(FAR_MS + payment.f0);
    }
    Long balanceBefore = balance.value();
    Long paymentsBefore = payments.value();
    long sum = (balanceBefore == null ? 0 : balanceBefore) + payment.f2;
    long count = (paymentsBefore == null ? 0 : paymentsBefore) + 1;
    balance.update(sum);
    payments.update(count);
    result.setFields(payment.f0, payment.f1, payment.f2, payment.f3, sum, count);
    out.collect(result);
  }
}
