from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Any

class FileType(Enum):
    NotFound = 0
    Unknown = 1
    File = 2
    Directory = 3

class FileInfo:
    path: str
    type: FileType
    mtime: datetime | None

class FileSelector:
    def __init__(
        self, base_dir: str, allow_not_found: bool = False, recursive: bool = False
    ) -> None: ...

class FileSystem:
    def open_output_stream(self, path: str) -> Any: ...
    def delete_file(self, path: str) -> None: ...
    def get_file_info(self, paths: Sequence[str] | FileSelector) -> list[FileInfo]: ...

class PyFileSystem(FileSystem):
    def __init__(self, handler: Any) -> None: ...
