"""How a batch of Spark's becomes visible as a whole, once; queries and writes share it."""
