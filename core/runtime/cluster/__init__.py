"""Where slots come from: Spark's barrier stage."""
