from collections.abc import Sequence
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

class FileSystem:
    def open_output_stream(self, path: str) -> Any: ...
    def delete_file(self, path: str) -> None: ...
    def get_file_info(self, paths: Sequence[str]) -> list[FileInfo]: ...

class PyFileSystem(FileSystem):
    def __init__(self, handler: Any) -> None: ...
