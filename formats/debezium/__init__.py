"""Debezium's change events as rows, from JSON and Avro."""
