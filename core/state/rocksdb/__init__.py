"""The backend that keeps state in a RocksDB on the slot's disk."""
