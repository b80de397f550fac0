"""`onceflow run`: starts a job that a program or a file describes, and waits for its end."""
