package onceflow.bench;

import java.time.Duration;
import org.apache.flink.configuration.CheckpointingOptions;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.PipelineOptions;
import org.apache.flink.configuration.RestartStrategyOptions;
import org.apache.flink.configuration.StateBackendOptions;
import org.apache.flink.contrib.streaming.state.RocksDBOptions;
import org.apache.flink.core.execution.CheckpointingMode;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/** What every job is given; all else is Flink's default: aligned checkpoints, and a buffer timeout of 100 ms. */
final class JobSettings {
  private JobSettings() {}

  /** Settings with which a job keeps its checkpoints, and what RocksDB has, in {@code directory}. */
  static Configuration of(String directory, String backend, Duration interval) {
    Configuration settings = new Configuration();
    settings.set(CheckpointingOptions.CHECKPOINTING_INTERVAL, interval);
    settings.set(CheckpointingOptions.CHECKPOINTING_CONSISTENCY_MODE, CheckpointingMode.EXACTLY_ONCE);
    settings.set(CheckpointingOptions.CHECKPOINT_STORAGE, "filesystem");
    settings.set(CheckpointingOptions.CHECKPOINTS_DIRECTORY, "file://" + directory + "/checkpoints");
    settings.set(CheckpointingOptions.INCREMENTAL_CHECKPOINTS, true);
    settings.set(StateBackendOptions.STATE_BACKEND, backend.equals("heap") ? "hashmap" : "rocksdb");
    settings.set(RocksDBOptions.LOCAL_DIRECTORIES, directory + "/rocksdb");
    settings.set(PipelineOptions.OBJECT_REUSE, true);
    settings.set(PipelineOptions.GENERIC_TYPES, false);
    settings.set(RestartStrategyOptions.RESTART_STRATEGY, "none");
    return settings;
  }

  static StreamExecutionEnvironment environment(Configuration settings) {
    StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment(settings);
    environment.setParallelism(Main.PARALLELISM);
    environment.setMaxParallelism(128);
    return environment;
  }
}
