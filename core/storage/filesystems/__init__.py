"""One contract of a file system, and what fulfils it: disks, buckets, HDFS, fsspec."""
