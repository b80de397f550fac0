package onceflow.bench;

import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.table.connector.source.DynamicTableSource;
import org.apache.flink.table.connector.source.LookupTableSource;
import org.apache.flink.table.connector.source.lookup.LookupFunctionProvider;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.factories.DynamicTableSourceFactory;
import org.apache.flink.table.functions.FunctionContext;
import org.apache.flink.table.functions.LookupFunction;

/**
 * The connector "side-input": a table of 10,000 keys with a text each, in memory.
 *
 * <p>Flink 1.20 has no lookup in files. Memory is the quickest that a lookup can be.
 */
public final class SideInput implements DynamicTableSourceFactory {
  private static final long KEYS = 10_000;

  @Override
  public String factoryIdentifier() {
    return "side-input";
  }

  @Override
  public Set<ConfigOption<?>> requiredOptions() {
    return Set.of();
  }

  @Override
  public Set<ConfigOption<?>> optionalOptions() {
    return Set.of();
  }

  @Override
  public DynamicTableSource createDynamicTableSource(Context context) {
    return new Table();
  }

  private static final class Table implements LookupTableSource {
    @Override
    public LookupRuntimeProvider getLookupRuntimeProvider(LookupContext context) {
      return LookupFunctionProvider.of(new Lookup());
    }

    @Override
    public DynamicTableSource copy() {
      return new Table();
    }

    @Override
    public String asSummaryString() {
      return "side-input";
    }
  }

  /** Finds the row of a key. */
  public static final class Lookup extends LookupFunction {
    private transient Map<Long, Collection<RowData>> rows;

    @Override
    public void open(FunctionContext context) {
      rows = new HashMap<>();
      for (long key = 0; key < KEYS; key++) {
        rows.put(key, Collections.singleton(GenericRowData.of(key, StringData.fromString("value " + key))));
      }
    }

    @Override
    public Collection<RowData> lookup(RowData key) {
      return rows.getOrDefault(key.getLong(0), Collections.emptySet());
    }
  }
}
