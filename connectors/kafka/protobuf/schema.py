"""Protobuf schemas, compiled, and the Arrow type that each field of a message becomes.

A field that can be absent (`optional`, of a oneof, a message, a wrapper) is nullable; another one
has Protobuf's default in its stead. google.protobuf.Timestamp is a timestamp in UTC, an enum the
name of its value, a wrapper its value. A message that contains itself has no Arrow type.

A registry keeps a schema as text, or as whoever registered it has sent it: Python's and .NET's
serializers send compiled descriptors in base64, which some registries give back as they are.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from onceflow.connectors.kafka.registry import KeptSchema, NamedSchema, SchemaKind
from onceflow.core.errors import ConfigError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

NEEDED_PROTOBUF = (
    "Protobuf is read and written by an extra: pip install '/path/to/onceflow[protobuf]'"
)

MessagePath: TypeAlias = tuple[int, ...]
"""A message by its place in its schema: of the outermost message first, then of those inside."""

_COMPILE_S = 120.0
"""Of a run of milliseconds, on a machine that has other things to do."""
_MAIN = "onceflow_registered.proto"
_LOGGED = re.compile(r"WARNING: All log messages|[IWEF]\d{4} ")
"""What the compiler says of itself."""
_SHOWN_CHARS = 500

_CONFLUENT = "confluent_kafka.schema_registry.confluent"
_BUILT_IN: Mapping[str, str] = {
    "confluent/meta.proto": f"{_CONFLUENT}.meta_pb2",
    "confluent/type/decimal.proto": f"{_CONFLUENT}.type.decimal_pb2",
    **{
        f"google/type/{name}.proto": f"google.type.{name}_pb2"
        for name in ("date", "datetime", "dayofweek", "latlng", "money", "timeofday")
    },
}
"""Files that Confluent's registry does not list as references, since it has them itself."""

TIMESTAMP = "google.protobuf.Timestamp"
WRAPPERS = frozenset(
    f"google.protobuf.{kind}Value"
    for kind in (
        *("Double", "Float", "Int64", "UInt64", "Int32", "UInt32"),
        *("Bool", "String", "Bytes"),
    )
)

_SCALARS: Mapping[int, pa.DataType] = {
    1: pa.float64(),  # double
    2: pa.float32(),  # float
    3: pa.int64(),  # int64
    4: pa.uint64(),  # uint64
    5: pa.int32(),  # int32
    6: pa.uint64(),  # fixed64
    7: pa.int64(),  # fixed32
    8: pa.bool_(),  # bool
    9: pa.string(),  # string
    12: pa.binary(),  # bytes
    13: pa.int64(),  # uint32
    15: pa.int32(),  # sfixed32
    16: pa.int64(),  # sfixed64
    17: pa.int32(),  # sint32
    18: pa.int64(),  # sint64
}
"""By the numbers of descriptor.proto. uint32 is wider: not every target has unsigned integers."""


@lru_cache(maxsize=64)
def compiled(schema: KeptSchema) -> bytes:
    """Return a schema and all that it imports as a FileDescriptorSet, itself as the last file.

    Runs Protobuf's own compiler as a process, which takes some tenths of a second; what this
    process has compiled is kept.

    Raises:
        ConfigError: It is no Protobuf schema, or the compiler is not installed or refuses it.
    """
    if schema.kind is not SchemaKind.PROTOBUF:
        raise ConfigError(f"it is {schema.kind.value}, and no Protobuf schema")
    with tempfile.TemporaryDirectory(prefix="onceflow-proto-") as name:
        directory = Path(name)
        sources = [*schema.references, NamedSchema(_MAIN, schema.text)]
        ready = [*_laid_out(sources, directory), *_built_in(sources)]
        known = directory / "known.descriptors"
        known.write_bytes(_set_of(ready))
        found = directory / "found.descriptors"
        _run_compiler(directory, known, found)
        return found.read_bytes()


def _laid_out(sources: Iterable[NamedSchema], directory: Path) -> Iterator[bytes]:
    """Write the texts of `sources` as files; yield those that are compiled already."""
    for one in sources:
        descriptor = _descriptor_in(one)
        if descriptor is not None:
            yield descriptor
            continue
        path = directory / one.name
        if not path.resolve().is_relative_to(directory.resolve()):
            raise ConfigError(f"it imports {one.name!r}, which is no path of its own")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.text, encoding="utf-8")


def _descriptor_in(source: NamedSchema) -> bytes | None:
    """Return the FileDescriptorProto in base64 that `source` is; None: it is text."""
    descriptor_pb2 = _protobuf("descriptor_pb2")
    try:
        raw = base64.b64decode("".join(source.text.split()), validate=True)
        found = descriptor_pb2.FileDescriptorProto.FromString(raw)
    except (binascii.Error, ValueError, _protobuf("message").DecodeError):
        return None
    found.name = source.name
    return bytes(found.SerializeToString())


def _built_in(sources: Iterable[NamedSchema]) -> Iterator[bytes]:
    texts = [one.text for one in sources]
    given = {one.name for one in sources}
    for name, module in _BUILT_IN.items():
        if name not in given and any(name in text for text in texts):
            try:
                yield importlib.import_module(module).DESCRIPTOR.serialized_pb
            except ImportError as error:
                raise ConfigError(f"{NEEDED_PROTOBUF} ({error})") from error


def _set_of(files: Iterable[bytes]) -> bytes:
    descriptor_pb2 = _protobuf("descriptor_pb2")
    found = descriptor_pb2.FileDescriptorSet()
    for one in files:
        found.file.add().MergeFromString(one)
    return bytes(found.SerializeToString())


def _run_compiler(directory: Path, known: Path, found: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{directory}"),
            *(f"--descriptor_set_in={known}", "--include_imports"),
            *(f"--descriptor_set_out={found}", _MAIN),
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_COMPILE_S,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if not _LOGGED.match(line)]
        said = "; ".join(lines).replace(f"{directory}/", "").replace(_MAIN, "the schema")
        if "No module named" in said:
            raise ConfigError(f"{NEEDED_PROTOBUF} ({said[-_SHOWN_CHARS:]})")
        raise ConfigError(f"it does not compile: {said[:_SHOWN_CHARS]}")


def _protobuf(module: str) -> Any:
    """Return a module of `google.protobuf`.

    Raises:
        ConfigError: Protobuf is not installed.
    """
    try:
        return importlib.import_module(f"google.protobuf.{module}")
    except ImportError as error:
        raise ConfigError(f"{NEEDED_PROTOBUF} ({error})") from error


def messages_of(descriptors: bytes) -> dict[MessagePath, str]:
    """Return the full name of each message of the schema that was compiled to `descriptors`."""
    main: FileDescriptorProto = _files(descriptors)[-1]
    return dict(_named(main.message_type, main.package, ()))


def _named(
    messages: Iterable[DescriptorProto], space: str, outer: MessagePath
) -> Iterator[tuple[MessagePath, str]]:
    # Maps are messages in descriptors only; Java, which set the rule, does not count them.
    written = [one for one in messages if not one.options.map_entry]
    for at, one in enumerate(written):
        name = f"{space}.{one.name}".lstrip(".")
        yield (*outer, at), name
        yield from _named(one.nested_type, name, (*outer, at))


def path_of(descriptors: bytes, message: str | None) -> MessagePath:
    """Return where the message called `message`, or the first, stands in its schema.

    Raises:
        ConfigError: There is none, or there are several that the name may mean.
    """
    messages = messages_of(descriptors)
    if not messages:
        raise ConfigError("its Protobuf schema has no message")
    if message is None:
        return next(iter(messages))
    exact = [path for path, name in messages.items() if name == message]
    found = exact or [path for path, name in messages.items() if name.endswith(f".{message}")]
    if len(found) != 1:
        names = ", ".join(messages.values())
        raise ConfigError(f"message={message!r} names {len(found)} of its messages: {names}")
    return found[0]


def message_of(descriptors: bytes, message: str | None = None) -> Descriptor:
    """Return the message called `message`, or the first, of a compiled schema.

    Raises:
        ConfigError: There is none, or Protobuf is not installed.
    """
    name = messages_of(descriptors)[path_of(descriptors, message)]
    pool = _protobuf("descriptor_pool").DescriptorPool()
    for one in _files(descriptors):
        pool.AddSerializedFile(one.SerializeToString())
    found: Descriptor = pool.FindMessageTypeByName(name)
    return found


def class_of(message: Descriptor) -> Any:
    """Return the Python class of `message`."""
    return _protobuf("message_factory").GetMessageClass(message)


def decode_error() -> type[Exception]:
    """Return what a class of `class_of` raises for bytes that are none of it."""
    found: type[Exception] = _protobuf("message").DecodeError
    return found


def encode_error() -> type[Exception]:
    """Return what a message of `class_of` raises that lacks a field that is required."""
    found: type[Exception] = _protobuf("message").EncodeError
    return found


def _files(descriptors: bytes) -> Any:
    return _protobuf("descriptor_pb2").FileDescriptorSet.FromString(descriptors).file


def columns_of_message(message: Descriptor, names: Iterable[str] | None = None) -> pa.Schema:
    """Return the columns that the fields of `message` become, or those of them called `names`.

    Raises:
        ConfigError: It has no field of such a name, or one of a message that contains itself.
    """
    fields = {one.name: one for one in message.fields}
    wanted = list(fields if names is None else names)
    lost = [name for name in wanted if name not in fields]
    if lost:
        raise ConfigError(
            f"message {message.full_name} has no fields {lost}, only {', '.join(fields)}"
        )
    return pa.schema([_field(fields[name], (message.full_name,)) for name in wanted])


def _field(field: FieldDescriptor, path: tuple[str, ...]) -> pa.Field:
    return pa.field(field.name, _type(field, path), nullable=is_nullable(field))


def is_repeated(field: FieldDescriptor) -> bool:
    """Return whether `field` is a list or a map."""
    described: Any = field
    # Protobuf 7 has no labels, and Protobuf 5 nothing else.
    repeated = getattr(described, "is_repeated", None)
    return bool(described.label == 3 if repeated is None else repeated)


def is_map(field: FieldDescriptor) -> bool:
    """Return whether `field` is a map."""
    message: Any = field.message_type
    return message is not None and bool(message.GetOptions().map_entry)


def is_nullable(field: FieldDescriptor) -> bool:
    """Return whether `field` can be absent."""
    return not is_repeated(field) and bool(field.has_presence)


def _type(field: FieldDescriptor, path: tuple[str, ...]) -> pa.DataType:
    if is_map(field):
        entry: Any = field.message_type
        key, value = (entry.fields_by_name[name] for name in ("key", "value"))
        return pa.map_(_single(key, path), pa.field("value", _single(value, path), nullable=False))
    one = _single(field, path)
    return pa.list_(pa.field("item", one, nullable=False)) if is_repeated(field) else one


def _single(field: FieldDescriptor, path: tuple[str, ...]) -> pa.DataType:
    described: Any = field
    if described.enum_type is not None:
        return pa.string()
    message: Descriptor | None = described.message_type
    if message is None:
        return _SCALARS[described.type]
    if message.full_name == TIMESTAMP:
        return pa.timestamp("us", "UTC")
    if message.full_name in WRAPPERS:
        return _single(message.fields[0], path)
    if message.full_name in path:
        raise ConfigError(
            f"field {field.name!r} is of message {message.full_name}, which contains itself: no"
            " column can hold it"
        )
    inner = (*path, message.full_name)
    return pa.struct([_field(one, inner) for one in message.fields])
