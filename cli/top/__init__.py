"""A running job in the terminal: `onceflow top`."""
