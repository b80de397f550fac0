package onceflow.bench;

import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.tuple.Tuple4;

/** An account's sum so far, beside each record: account, amount, sent_us, balance. */
public final class AccountBalance
    extends RichMapFunction<Tuple3<String, Long, Long>, Tuple4<String, Long, Long, Long>> {
  private transient ValueState<Long> balance;

  @Override
  public void open(OpenContext context) {
    balance = getRuntimeContext().getState(new ValueStateDescriptor<>("balance", Types.LONG));
  }

  @Override
  public Tuple4<String, Long, Long, Long> map(Tuple3<String, Long, Long> record) throws Exception {
    Long before = balance.value();
    long sum = (before == null ? 0 : before) + record.f1;
    balance.update(sum);
    return Tuple4.of(record.f0, record.f1, record.f2, sum);
  }
}
