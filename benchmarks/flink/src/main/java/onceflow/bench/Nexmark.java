package onceflow.bench;

import java.io.BufferedReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import org.apache.flink.api.common.JobID;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.PipelineOptions;
import org.apache.flink.runtime.execution.ExecutionState;
import org.apache.flink.runtime.executiongraph.AccessExecutionGraph;
import org.apache.flink.runtime.executiongraph.AccessExecutionVertex;
import org.apache.flink.runtime.jobgraph.JobGraph;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.Table;
import org.apache.flink.table.api.TableDescriptor;
import org.apache.flink.table.api.bridge.java.StreamStatementSet;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;
import org.apache.flink.table.api.config.ExecutionConfigOptions;
import org.apache.flink.table.api.config.OptimizerConfigOptions;
import org.apache.flink.table.api.config.TableConfigOptions;

/**
 * Flink's side of benchmarks/nexmark/beside_flink.py: one statement of SQL over the events of a topic.
 *
 * <p>Lines on stdin say what to do: "run DIRECTORY BACKEND PARALLELISM SINK". The file "job.sql" of the directory
 * has statements that are separated by lines of "--"; the last one is a SELECT. SINK is "blackhole", "log" for
 * partitioned files, or "changes" for files with each change of the result. A line is answered with "running" when all
 * tasks run, and with "stopped" when the job has ended. A failure is answered with "failed: …".
 */
public final class Nexmark {
  private static final Duration CHECKPOINT_INTERVAL = Duration.ofSeconds(1);
  private static final long LOOK_INTERVAL_MS = 2;

  private Nexmark() {}

  public static void main(String[] arguments) throws Exception {
    Main.serve(Nexmark::run);
  }

  private static void run(MiniCluster flink, String[] words, BufferedReader lines) throws Exception {
    JobGraph graph = graph(words[1], words[2], Integer.parseInt(words[3]), words[4]);
    JobID job = graph.getJobID();
    flink.submitJob(graph).get();
    while (!allRun(flink.getExecutionGraph(job).get())) {
      Thread.sleep(LOOK_INTERVAL_MS);
    }
    System.out.println("running");
    Main.awaitSuccess(flink, job);
  }

  /** Whether all tasks run at the same time, or have already ended. */
  private static boolean allRun(AccessExecutionGraph graph) {
    if (graph.getState().isGloballyTerminalState()) {
      return true;
    }
    for (AccessExecutionVertex task : graph.getAllExecutionVertices()) {
      ExecutionState state = task.getExecutionState();
      if (state != ExecutionState.RUNNING && !state.isTerminal()) {
        return false;
      }
    }
    return true;
  }

  private static JobGraph graph(String directory, String backend, int parallelism, String sink) throws Exception {
    Configuration settings = JobSettings.of(directory, backend, CHECKPOINT_INTERVAL);
    settings.set(PipelineOptions.AUTO_WATERMARK_INTERVAL, Duration.ofMillis(200));
    settings.set(TableConfigOptions.LOCAL_TIME_ZONE, "UTC");
    // The settings of the benchmark's own repository, github.com/nexmark/nexmark.
    settings.set(ExecutionConfigOptions.TABLE_EXEC_MINIBATCH_ENABLED, true);
    settings.set(ExecutionConfigOptions.TABLE_EXEC_MINIBATCH_ALLOW_LATENCY, Duration.ofSeconds(2));
    settings.set(ExecutionConfigOptions.TABLE_EXEC_MINIBATCH_SIZE, 50_000L);
    settings.set(OptimizerConfigOptions.TABLE_OPTIMIZER_DISTINCT_AGG_SPLIT_ENABLED, true);
    StreamExecutionEnvironment environment = JobSettings.environment(settings);
    environment.setParallelism(parallelism);
    StreamTableEnvironment tables = StreamTableEnvironment.create(environment);
    tables.createTemporarySystemFunction("count_char", new CountChar());
    String[] statements = Files.readString(Path.of(directory, "job.sql")).split("\n--\n");
    for (String statement : Arrays.copyOf(statements, statements.length - 1)) {
      tables.executeSql(statement);
    }
    Table result = tables.sqlQuery(statements[statements.length - 1]);
    if (sink.equals("changes")) {
      tables.toChangelogStream(result).addSink(new ChangesSink(directory));
    } else {
      StreamStatementSet inserts = tables.createStatementSet();
      inserts.addInsert(sink.equals("log") ? log(directory) : TableDescriptor.forConnector("blackhole").build(), result);
      inserts.attachAsDataStream();
    }
    return environment.getStreamGraph().getJobGraph();
  }

  /** Files by day and minute, of which a new one begins after a minute or with a checkpoint. */
  private static TableDescriptor log(String directory) {
    return TableDescriptor.forConnector("filesystem")
        .option("path", "file://" + directory + "/log")
        .format("json")
        .partitionedBy("day", "minute")
        .build();
  }
}
