"""msgspec's decoders, each made by one thread at a time.

msgspec keeps what it knows of a class with the class, from its first decoder on, and lets others
see it before it is whole: two threads that make the first ones at once end the process by SIGSEGV
(seen with 0.22). Decoding itself needs no lock. A test sees to it that all are made here.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec
import msgspec.inspect

_T = TypeVar("_T")

# The annotations of a class may run anything, also what makes a decoder.
_making = threading.RLock()


@overload
def json_decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]: ...


@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return what decodes `kind` from JSON. Any thread; what it returns, too."""
    with _making:
        return msgspec.json.Decoder(kind)


@overload
def msgpack_decoder(kind: type[_T]) -> msgspec.msgpack.Decoder[_T]: ...


@overload
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]: ...


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return what decodes `kind` from MessagePack. Any thread; what it returns, too."""
    with _making:
        return msgspec.msgpack.Decoder(kind)


def type_info(kind: Any) -> msgspec.inspect.Type:
    """Return what msgspec makes of a type, for which it makes a decoder. Any thread."""
    with _making:
        return msgspec.inspect.type_info(kind)
