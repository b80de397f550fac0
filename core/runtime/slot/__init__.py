"""The process of one slot, which runs a subtask of every chain and communicates with the driver."""
