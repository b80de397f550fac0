"""The backend that keeps state in memory, and the entry tables that RocksDB's backend shares."""
