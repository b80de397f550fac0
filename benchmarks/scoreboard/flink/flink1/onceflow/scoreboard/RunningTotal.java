package onceflow.scoreboard;

import org.apache.flink.configuration.Configuration;

/** The running total, as Flink 1.20 opens functions. */
final class RunningTotal extends AddAmount {
  private static final long serialVersionUID = 1L;

  @Override
  public void open(Configuration parameters) {
    openState();
  }
}
