from typing import Any

from pyarrow import Schema, Table
from typing_extensions import Self

class ParquetWriter:
    schema: Schema
    def __init__(
        self,
        where: Any,
        schema: Schema,
        *,
        compression: str | dict[str, str] = ...,
        **options: Any,
    ) -> None: ...
    def write_table(self, table: Table, row_group_size: int | None = ...) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...

class ParquetFile:
    num_row_groups: int
    metadata: Any
    def __init__(self, source: Any, **options: Any) -> None: ...
    def read(self, columns: list[str] | None = ..., **options: Any) -> Table: ...

def read_table(source: Any, *, columns: list[str] | None = ..., **options: Any) -> Table: ...
def write_table(
    table: Table,
    where: Any,
    row_group_size: int | None = ...,
    compression: str | dict[str, str] = ...,
    **options: Any,
) -> None: ...
