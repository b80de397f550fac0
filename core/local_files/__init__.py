"""Files of this machine alone: what it keeps from run to run, and what a process leaves behind."""
