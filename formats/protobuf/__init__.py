"""The conversion between Protobuf and Arrow: schemas and values."""
