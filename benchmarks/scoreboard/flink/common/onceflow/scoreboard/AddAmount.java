package onceflow.scoreboard;

import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;

/** Adds each payment to the running total of its account, which is keyed state. */
abstract class AddAmount extends RichMapFunction<Payment, Total> {
  private static final long serialVersionUID = 1L;
  private transient ValueState<Total> state;

  final void openState() {
    state = getRuntimeContext().getState(new ValueStateDescriptor<>("total", Total.class));
  }

  @Override
  public Total map(Payment payment) throws Exception {
    Total before = state.value();
    Total after = new Total();
    after.account = payment.account;
    after.total = payment.amount + (before == null ? 0 : before.total);
    after.n = 1 + (before == null ? 0 : before.n);
    state.update(after);
    return after;
  }
}
