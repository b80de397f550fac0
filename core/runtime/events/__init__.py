"""What happens in a job, the status that it adds up to, and who is told."""
