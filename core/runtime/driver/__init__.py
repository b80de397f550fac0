"""What runs where the user called `start`: attempts, recovery, decisions, and who may ask."""
