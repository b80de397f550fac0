"""The connection to MySQL and MariaDB, their catalog and their column types."""
