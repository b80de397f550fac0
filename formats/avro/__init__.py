"""The conversion between Avro and Arrow: schemas and values."""
