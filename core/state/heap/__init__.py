"""The backend that keeps state in memory, and its tables: those of RocksDB are above the same."""
