"""What a job measures, under the names that Prometheus scrapes."""
