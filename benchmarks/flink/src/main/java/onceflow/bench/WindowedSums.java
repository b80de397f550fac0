package onceflow.bench;

import java.time.Duration;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.api.java.tuple.Tuple5;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/** Sum and count of each key in tumbling windows, aggregated record by record as they come. */
final class WindowedSums {
  private WindowedSums() {}

  static DataStream<Tuple5<String, Long, Long, Long, Long>> of(
      DataStream<Tuple4<Long, String, Long, Long>> payments) {
    return payments
        .keyBy(payment -> payment.f1)
        .window(TumblingEventTimeWindows.of(Duration.ofSeconds(400)))
        .aggregate(new Sums(), new WithKeyAndWindow());
  }

  private static final class Sums
      implements AggregateFunction<Tuple4<Long, String, Long, Long>, Tuple2<Long, Long>, Tuple2<Long, Long>> {
    @Override
    public Tuple2<Long, Long> createAccumulator() {
      return Tuple2.of(0L, 0L);
    }

    @Override
    public Tuple2<Long, Long> add(Tuple4<Long, String, Long, Long> payment, Tuple2<Long, Long> total) {
      total.f0 += payment.f2;
      total.f1 += 1;
      return total;
    }

    @Override
    public Tuple2<Long, Long> getResult(Tuple2<Long, Long> total) {
      return total;
    }

    @Override
    public Tuple2<Long, Long> merge(Tuple2<Long, Long> one, Tuple2<Long, Long> other) {
      return Tuple2.of(one.f0 + other.f0, one.f1 + other.f1);
    }
  }

  private static final class WithKeyAndWindow
      extends ProcessWindowFunction<Tuple2<Long, Long>, Tuple5<String, Long, Long, Long, Long>, String, TimeWindow> {
    @Override
    public void process(
        String account,
        Context context,
        Iterable<Tuple2<Long, Long>> totals,
        Collector<Tuple5<String, Long, Long, Long, Long>> out) {
      Tuple2<Long, Long> total = totals.iterator().next();
      out.collect(
          Tuple5.of(account, context.window().getStart(), context.window().getEnd(), total.f0, total.f1));
    }
  }
}
