package onceflow.bench;

import org.apache.flink.table.functions.ScalarFunction;

/** The number of times that a text has a letter. */
public final class CountChar extends ScalarFunction {
  /** Returns it. */
  public long eval(String text, String letter) {
    long count = 0;
    if (text != null) {
      char wanted = letter.charAt(0);
      for (int index = 0; index < text.length(); index++) {
        if (text.charAt(index) == wanted) {
          count++;
        }
      }
    }
    return count;
  }
}
