"""The interface of a file system, and its implementations: disks, buckets, HDFS, fsspec."""
