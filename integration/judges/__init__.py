"""One judge for each kind of target; `onceflow.integration.judge` chooses between them."""
