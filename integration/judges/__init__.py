"""The judges of single kinds of targets. `onceflow.integration.judge` selects one."""
