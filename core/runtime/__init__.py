"""The shell on Spark: job driver, slots, subtasks, channels, control stream."""
