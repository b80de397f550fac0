"""The metrics of a job, under the names that Prometheus scrapes."""
