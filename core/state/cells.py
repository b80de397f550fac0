"""What a state object keeps for a value: the value itself if nobody can change it, else its bytes.

So a list changed after `set`, or after `get`, changes neither the state nor a snapshot under way,
and both backends give the same answers. A value is checked when it is set: what could not be
restored is refused at once, not by the restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from onceflow.core.errors import BadStateValue, StateIncompatible
from onceflow.core.state.serializers import Serializer

Stored: TypeAlias = Any
"""A value of a direct type, or `Encoded`."""


class Encoded(bytes):
    """The bytes of a value that could be changed in place."""

    __slots__ = ()


class Absent:
    """Marks that there is no entry."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ABSENT"


class NoDirectType:
    """The class of no value."""


ABSENT = Absent()
DELETED = Absent()
"""In a layer of changes: the entry is gone, whatever lies below."""


class Cells:
    """Turns values into what is stored, into bytes, and back; for one state."""

    def __init__(self, serializer: Serializer[Any], name: str) -> None:
        self._serializer = serializer
        self._name = name
        self._direct = frozenset(serializer.direct_types)
        self.encode = serializer.encode
        self.decode = serializer.decode
        single = len(self._direct) == 1
        self.direct: type[Any] = next(iter(self._direct)) if single else NoDirectType
        """The class whose values are stored as they are; `NoDirectType` unless there is one."""

    def freeze(self, value: Any) -> Stored:
        """Return what to store for `value`.

        Raises:
            BadStateValue: It is not of the state's type.
        """
        if value.__class__ in self._direct:
            return value
        try:
            data = self.encode(value)
            read_back = self.decode(data)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadStateValue(
                f"state {self._name!r} holds {self._serializer.signature} and cannot hold"
                f" {value!r:.80} ({type(value).__name__}): {error}"
            ) from error
        return read_back if read_back.__class__ in self._direct else Encoded(data)

    def thaw(self, stored: Stored) -> Any:
        """Return the value of what was stored: the caller's own, to change as it likes."""
        return self.decode(stored) if stored.__class__ is Encoded else stored

    def to_bytes(self, stored: Stored) -> bytes:
        """Return the bytes for a snapshot."""
        return bytes(stored) if stored.__class__ is Encoded else self.encode(stored)

    def to_bytes_all(self, stored: Sequence[Stored]) -> Sequence[bytes]:
        """Return `to_bytes` of each; in one go when they are all of one kind."""
        classes = set(map(type, stored))
        if classes == {Encoded}:
            return stored
        if Encoded not in classes:
            return list(map(self.encode, stored))
        return list(map(self.to_bytes, stored))

    def from_bytes(self, data: bytes) -> Stored:
        """Return what to store for bytes of a snapshot.

        Raises:
            StateIncompatible: The type of the same name no longer takes them.
        """
        try:
            value = self.decode(data)
        except (TypeError, ValueError) as error:
            raise StateIncompatible(
                f"state {self._name!r} does not read as {self._serializer.signature} any more:"
                f" {error}; give new fields a default, or the state another name"
            ) from error
        return value if value.__class__ in self._direct else Encoded(data)
