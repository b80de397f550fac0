from typing import Any

from pyarrow import Schema, Table

class Partitioning: ...

class Dataset:
    files: list[str]
    schema: Schema
    def to_table(self, columns: list[str] | None = ..., **options: Any) -> Table: ...

def dataset(
    source: Any,
    schema: Schema | None = ...,
    format: str | None = ...,
    filesystem: Any = ...,
    partitioning: Partitioning | str | None = ...,
    **options: Any,
) -> Dataset: ...
def partitioning(
    schema: Schema | None = ..., *, flavor: str | None = ..., **options: Any
) -> Partitioning: ...
