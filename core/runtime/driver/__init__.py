"""What runs where the user called `start`: attempts, recovery, decisions and the job's status."""
