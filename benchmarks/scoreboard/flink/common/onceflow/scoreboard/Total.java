package onceflow.scoreboard;

/** The running total of an account. A POJO of Flink. */
public final class Total {
  public String account;
  public long total;
  public long n;
}
