"""The decoding of bytes that other processes wrote: msgspec decoders, and checks of file names.

When msgspec builds the first decoder of a class, it stores information in the class before that is
complete. If two threads build the first decoders concurrently, the process dies by SIGSEGV (seen
with 0.22). Decoding itself needs no lock. A test checks that all decoders are built here.

A user who can write to checkpoint storage can decide what a job commits. They must not gain access
to other files. So a stored name must not lead out of its directory, by an absolute path, by ".." or
by a link. Every reader of a stored description checks its names here.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
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


class UnsafeName(ValueError):
    """Raised when a stored name leads out of its directory."""


def resolve_stored_name(name: str, directory: str | Path | None = None) -> str:
    """Return `name` if it is a path inside its directory.

    With `directory`, a directory of this machine, links that lead out of it are refused, too. The
    file need not exist.

    Raises:
        UnsafeName: The name leads out of its directory.
    """
    parts = name.split("/")
    if "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise UnsafeName(f"the name {name!r} leads out of its directory")
    if directory is not None:
        # The directory itself may be behind a link, which its owner has made.
        real = os.path.realpath(directory)
        target = os.path.realpath(Path(real, name))
        if os.path.commonpath([real, target]) != real:
            raise UnsafeName(
                f"the name {name!r} leads out of its directory {real}: a symbolic link points"
                f" to {target}"
            )
    return name


def resolve_file_name(name: str, directory: str | Path | None = None) -> str:
    """Return `name` if it is a file directly in its directory.

    Raises:
        UnsafeName: The name leads out of its directory.
    """
    if "/" in name:
        raise UnsafeName(f"the name {name!r} leads out of its directory")
    return resolve_stored_name(name, directory)
