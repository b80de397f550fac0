"""Sessions with SQL databases: their errors, their tables and the values that columns accept."""
