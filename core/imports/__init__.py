"""Names that are imported when they are first used, and the extras that install what they need."""
