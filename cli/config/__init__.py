"""The command `onceflow config`, which prints every setting with its origin."""
