# The compute functions take and return arrays and scalars of either kind: Any, but real names.
from typing import Any

def __getattr__(name: str) -> Any: ...
