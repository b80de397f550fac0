"""A producer of records that Python's client cannot write: it takes bytes as names of headers.

Clients of other languages write such records. This one calls librdkafka, a part of confluent-kafka.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import confluent_kafka

_TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _TIMESTAMP, _HEADERS = 1, 3, 4, 5, 7, 8, 10
_COPY = 2
_FLUSH_MS = 60_000


class _Memory(ctypes.Structure):
    _fields_ = (("ptr", ctypes.c_char_p), ("size", ctypes.c_size_t))


class _Either(ctypes.Union):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("i32", ctypes.c_int32),
        ("i64", ctypes.c_int64),
        ("memory", _Memory),
        ("pointer", ctypes.c_void_p),
        ("padding", ctypes.c_char * 64),
    )


class _Argument(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("of", _Either))


def _load() -> Any:
    directory = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    (path,) = directory.glob("librdkafka-*.so*")
    library = ctypes.CDLL(str(path))
    for name in ("conf_new", "new", "headers_new", "produceva"):
        getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
    return library


class OctetProducer:
    """Writes to one cluster; a context manager, which returns once the broker has all records."""

    def __init__(self, servers: str) -> None:
        self._library = _load()
        reason = ctypes.create_string_buffer(512)
        configuration = ctypes.c_void_p(self._library.rd_kafka_conf_new())
        options = {b"bootstrap.servers": servers.encode(), b"linger.ms": b"0"}
        for option in options.items():
            assert not self._library.rd_kafka_conf_set(configuration, *option, reason, 512)
        made = self._library.rd_kafka_new(0, configuration, reason, 512)
        assert made, reason.value
        self._producer = ctypes.c_void_p(made)

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[bytes, bytes | None]] = (),
        timestamp_ms: int | None = None,
    ) -> None:
        """Enqueue one record for partition 0; without a time it gets the present one."""
        arguments = [
            _Argument(_TOPIC, _Either(text=topic.encode())),
            _Argument(_PARTITION, _Either(i32=0)),
            _Argument(_FLAGS, _Either(i32=_COPY)),
            _Argument(_VALUE, _Either(memory=_Memory(value, len(value or b"")))),
            _Argument(_KEY, _Either(memory=_Memory(key, len(key or b"")))),
        ]
        if timestamp_ms is not None:
            arguments.append(_Argument(_TIMESTAMP, _Either(i64=timestamp_ms)))
        if headers:
            arguments.append(_Argument(_HEADERS, _Either(pointer=self._headers(headers))))
        array = (_Argument * len(arguments))(*arguments)
        count = ctypes.c_size_t(len(arguments))
        assert not self._library.rd_kafka_produceva(self._producer, array, count)

    def _headers(self, headers: Sequence[tuple[bytes, bytes | None]]) -> int:
        made: int = self._library.rd_kafka_headers_new(ctypes.c_size_t(len(headers)))
        for name, value in headers:
            sizes = ctypes.c_ssize_t(len(name)), ctypes.c_ssize_t(len(value or b""))
            added = self._library.rd_kafka_header_add(
                ctypes.c_void_p(made), name, sizes[0], value, sizes[1]
            )
            assert not added
        return made

    def flush(self) -> None:
        """Return when the broker has answered for all records."""
        assert not self._library.rd_kafka_flush(self._producer, _FLUSH_MS)

    def __enter__(self) -> OctetProducer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.flush()
        finally:
            self._library.rd_kafka_destroy(self._producer)
