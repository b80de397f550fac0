"""The protocol by which a Spark batch becomes visible as a whole, once, for queries and writes."""
