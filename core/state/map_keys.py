"""The check that a map state's keys can be restored as what they are."""

from __future__ import annotations

from typing import Any

from onceflow.core.errors import BadStateValue
from onceflow.core.state.cells import Cells
from onceflow.core.state.key_codec import encode_key
from onceflow.core.state.serializers import serializer_of


class MapKeys:
    """Checks the keys of one map state."""

    def __init__(self, key_type: Any, name: str) -> None:
        self._name = name
        self._cells = Cells(serializer_of(key_type), name)
        self.signature = serializer_of(key_type).signature

    def check(self, key: Any) -> None:
        """Return when `key` can be a key of the map.

        Raises:
            BadStateValue: It is None, cannot be hashed for ever, or is not of the declared type.
        """
        if key.__class__ is self._cells.direct:
            return
        frozen = self._cells.freeze(key)
        if frozen.__class__ is not key.__class__ and not isinstance(key, tuple):
            raise BadStateValue(
                f"map state {self._name!r} has keys of {self.signature}, not"
                f" {type(key).__name__}: {key!r:.80}"
            )
        encode_key(key)
