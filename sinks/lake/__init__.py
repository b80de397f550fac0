"""What sinks of lake tables share: data files come first, and a version that names them last."""
