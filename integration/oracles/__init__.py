"""How each kind of target is asked what it holds; `onceflow.integration.oracle` is their face."""
