package onceflow.bench;

import java.time.Duration;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.api.java.tuple.Tuple7;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.functions.co.ProcessJoinFunction;
import org.apache.flink.util.Collector;

/** Pairs of payments of one account on two streams, at most 50 seconds apart. */
final class NearInTime {
  private NearInTime() {}

  static DataStream<Tuple7<String, Long, Long, Long, Long, Long, Long>> of(
      DataStream<Tuple4<Long, String, Long, Long>> left, DataStream<Tuple4<Long, String, Long, Long>> right) {
    return left.keyBy(payment -> payment.f1)
        .intervalJoin(right.keyBy(payment -> payment.f1))
        .between(Duration.ofSeconds(-50), Duration.ofSeconds(50))
        .process(new Pairs());
  }

  private static final class Pairs
      extends ProcessJoinFunction<
          Tuple4<Long, String, Long, Long>,
          Tuple4<Long, String, Long, Long>,
          Tuple7<String, Long, Long, Long, Long, Long, Long>> {
    @Override
    public void processElement(
        Tuple4<Long, String, Long, Long> left,
        Tuple4<Long, String, Long, Long> right,
        Context context,
        Collector<Tuple7<String, Long, Long, Long, Long, Long, Long>> out) {
      out.collect(Tuple7.of(left.f1, left.f0, left.f2, left.f3, right.f0, right.f2, right.f3));
    }
  }
}
