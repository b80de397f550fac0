"""The page of all jobs in a storage: `onceflow ui`."""
