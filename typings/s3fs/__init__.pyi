# Only tests use it by name; the file sink reaches it through fsspec.
from typing import Any

def S3FileSystem(**options: Any) -> Any: ...
