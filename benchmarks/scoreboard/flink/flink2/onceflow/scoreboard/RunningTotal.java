package onceflow.scoreboard;

import org.apache.flink.api.common.functions.OpenContext;

/** The running total, as Flink 2 opens functions. */
final class RunningTotal extends AddAmount {
  private static final long serialVersionUID = 1L;

  @Override
  public void open(OpenContext context) {
    openState();
  }
}
