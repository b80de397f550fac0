package onceflow.bench;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import org.apache.flink.api.common.JobID;
import org.apache.flink.api.java.tuple.Tuple;
import org.apache.flink.configuration.CheckpointingOptions;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.MemorySize;
import org.apache.flink.configuration.PipelineOptions;
import org.apache.flink.configuration.RestOptions;
import org.apache.flink.configuration.TaskManagerOptions;
import org.apache.flink.configuration.WebOptions;
import org.apache.flink.core.execution.CheckpointType;
import org.apache.flink.core.execution.SavepointFormatType;
import org.apache.flink.runtime.checkpoint.AbstractCheckpointStats;
import org.apache.flink.runtime.checkpoint.CompletedCheckpointStats;
import org.apache.flink.runtime.checkpoint.TaskStateStats;
import org.apache.flink.runtime.jobgraph.JobGraph;
import org.apache.flink.runtime.jobmaster.JobResult;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.runtime.minicluster.MiniClusterConfiguration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * Runs jobs in a local cluster of one task manager with two slots, as lines on stdin say: "run WORK BACKEND DIRECTORY",
 * "checkpoint" for one that is taken at once, and "stop" once enough is measured. Answers each "checkpoint" with
 * "checkpointed" when it is complete, each "stop" with "stopped", what fails with "failed: …".
 */
public final class Main {
  static final int PARALLELISM = 2;
  private static final long TIMERS = 1_000_000;
  private static final String ON_REQUEST = "million-keys-whole";
  private static final Duration NEVER = Duration.ofDays(1);

  private Main() {}

  /** What one line "run …" asks for; returns once the job has stopped. */
  interface Run {
    void run(MiniCluster flink, String[] words, BufferedReader lines) throws Exception;
  }

  public static void main(String[] arguments) throws Exception {
    serve(Main::run);
  }

  /** Starts the cluster, and runs one job after the other, until stdin ends. */
  static void serve(Run job) throws Exception {
    Configuration settings = new Configuration();
    settings.set(RestOptions.BIND_PORT, "0");
    settings.set(WebOptions.CHECKPOINTS_HISTORY_SIZE, 100);
    settings.set(TaskManagerOptions.MANAGED_MEMORY_SIZE, MemorySize.ofMebiBytes(512));
    MiniClusterConfiguration cluster =
        new MiniClusterConfiguration.Builder()
            .setConfiguration(settings)
            .setNumTaskManagers(1)
            .setNumSlotsPerTaskManager(PARALLELISM)
            .build();
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
    try (MiniCluster flink = new MiniCluster(cluster)) {
      flink.start();
      System.out.println("ready");
      for (String line = lines.readLine(); line != null; line = lines.readLine()) {
        try {
          job.run(flink, line.split(" "), lines);
          System.out.println("stopped");
        } catch (Exception error) {
          error.printStackTrace();
          System.out.println("failed: " + error);
        }
      }
    }
  }

  private static void run(MiniCluster flink, String[] words, BufferedReader lines) throws Exception {
    String directory = words[3];
    JobGraph graph = graph(words[1], words[2], directory);
    JobID job = graph.getJobID();
    flink.submitJob(graph).get();
    for (String line = lines.readLine(); "checkpoint".equals(line); line = lines.readLine()) {
      flink.triggerCheckpoint(job, CheckpointType.CONFIGURED).get();
      System.out.println("checkpointed");
    }
    Files.write(Path.of(directory, "checkpoint-times"), checkpoints(flink, job));
    stop(flink, job, directory);
  }

  /** Stops a job with a savepoint: its sinks have then committed all that it has read. */
  static void stop(MiniCluster flink, JobID job, String directory) throws Exception {
    flink.stopWithSavepoint(job, directory + "/savepoints", false, SavepointFormatType.NATIVE).get();
    awaitSuccess(flink, job);
  }

  /** Returns when a job has ended by itself. */
  static void awaitSuccess(MiniCluster flink, JobID job) throws Exception {
    JobResult result = flink.requestJobResult(job).get();
    if (!result.isSuccess()) {
      Throwable cause =
          result.getSerializedThrowable().map(one -> one.deserializeError(Main.class.getClassLoader())).orElse(null);
      throw new IllegalStateException("the job ended with " + result.getApplicationStatus(), cause);
    }
  }

  private static JobGraph graph(String work, String backend, String directory) {
    Configuration settings = JobSettings.of(directory, backend, work.equals(ON_REQUEST) ? NEVER : Duration.ofSeconds(1));
    if (work.equals(ON_REQUEST)) {
      // The first one would come some time before that.
      settings.set(CheckpointingOptions.MIN_PAUSE_BETWEEN_CHECKPOINTS, NEVER);
    }
    settings.set(PipelineOptions.AUTO_WATERMARK_INTERVAL, Duration.ofMillis(100));
    StreamExecutionEnvironment environment = JobSettings.environment(settings);
    result(environment, work, directory).addSink(new CountingSink<>(directory));
    return environment.getStreamGraph().getJobGraph();
  }

  private static DataStream<? extends Tuple> result(
      StreamExecutionEnvironment environment, String work, String directory) {
    switch (work) {
      case "balance", "balance-ttl":
        return Payments.stream(environment, "payments", directory, 0)
            .keyBy(payment -> payment.f1)
            .map(new Balance(work.equals("balance-ttl")));
      case "function", "timers":
        return Payments.stream(environment, "payments", directory, 0)
            .keyBy(payment -> payment.f1)
            .process(new BalanceWithTimers(work.equals("timers") ? TIMERS : 0));
      case "windows":
        return WindowedSums.of(Payments.timed(environment, "payments", directory, 0));
      case "join":
        return NearInTime.of(
            Payments.timed(environment, "payments", directory, 0),
            Payments.timed(environment, "others", directory, 1));
      case "million-keys", ON_REQUEST:
        return MillionKeys.of(environment, directory);
      default:
        throw new IllegalArgumentException("no such work: " + work);
    }
  }

  /** A line a completed checkpoint: when it was triggered, its duration, its synchronous part, bytes written. */
  private static List<String> checkpoints(MiniCluster flink, JobID job) throws Exception {
    List<String> found = new ArrayList<>();
    for (AbstractCheckpointStats one :
        flink.getExecutionGraph(job).get().getCheckpointStatsSnapshot().getHistory().getCheckpoints()) {
      if (one instanceof CompletedCheckpointStats completed) {
        long syncMs = 0;
        for (TaskStateStats task : completed.getAllTaskStateStats()) {
          syncMs = Math.max(syncMs, task.getSummaryStats().getSyncCheckpointDurationStats().getMaximum());
        }
        found.add(
            completed.getTriggerTimestamp() / 1e3
                + " " + completed.getEndToEndDuration()
                + " " + syncMs
                + " " + completed.getCheckpointedSize());
      }
    }
    return found;
  }
}
