"""The constructors of msgspec decoders, which let only one thread build a decoder at a time.

When msgspec builds the first decoder of a class, it stores information in the class before that is
complete. If two threads build the first decoders concurrently, the process dies by SIGSEGV (seen
with 0.22). Decoding itself needs no lock. A test checks that all decoders are built here.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec
import msgspec.inspect

_T = TypeVar("_T")

# Reentrant, because evaluating the annotations of a class may build another decoder.
_making = threading.RLock()


@overload
def json_decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]: ...


@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a JSON decoder for `kind`. Any thread may call this and use the decoder."""
    with _making:
        return msgspec.json.Decoder(kind)


@overload
def msgpack_decoder(kind: type[_T]) -> msgspec.msgpack.Decoder[_T]: ...


@overload
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]: ...


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a MessagePack decoder for `kind`. Any thread may call this and use the decoder."""
    with _making:
        return msgspec.msgpack.Decoder(kind)


def type_info(kind: Any) -> msgspec.inspect.Type:
    """Return msgspec's description of a type, which also builds a decoder. Any thread."""
    with _making:
        return msgspec.inspect.type_info(kind)
