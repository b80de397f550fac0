"""One process of a job: it hosts a subtask of every chain and speaks with the driver."""
