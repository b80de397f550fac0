"""The command `onceflow run`, which starts a job from a program or file and waits for its end."""
