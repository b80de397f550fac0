package onceflow.scoreboard;

/** A record of the topic, and a row of the table. A POJO of Flink. */
public final class Payment {
  public long id;
  public String account;
  public long amount;
  public long ts;
}
