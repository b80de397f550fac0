"""The command `onceflow top`, which shows a running job in the terminal."""
