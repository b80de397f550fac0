"""The compilation of Protobuf schemas, and the conversion between messages and Arrow types.

A field that can be absent (`optional`, in a oneof, a message, a wrapper) is nullable. Any other
absent field has Protobuf's default. google.protobuf.Timestamp is a timestamp in UTC. An enum is the
name of its value, or its number if it has no name. A wrapper is its value. A message that contains
itself has no Arrow type.

In the other direction, a nullable column is an optional field, and a null list or map is empty.
Fields are identified by number. A column keeps its number in the subject's latest version. A new
column gets the next number that no version has used. The number of a removed column becomes
reserved.

A registry stores a schema as text, or as the registering client sent it. Python's and .NET's
serializers send compiled descriptors in base64, which some registries return unchanged.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.clients.kafka.registry import KeptSchema, NamedSchema, SchemaKind
from onceflow.core.arrow.kinds import IsKind, is_bytes, is_list, is_text, to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.core.imports import make_missing, naming_one_extra
from onceflow.formats import registry_schemas
from onceflow.formats.faulty_parts import ENTRIES, ITEMS

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

MessagePath: TypeAlias = tuple[int, ...]
"""The path of a message in its schema: the index of the outermost message, then those inside."""

_COMPILE_S = 120.0
"""The maximum time in seconds of a compiler run. It takes milliseconds unless the machine is busy.
"""
_EXTRA = "protobuf"
_MAIN = "onceflow_registered.proto"
_MISSING_MODULE = re.compile(r"No module named '?([\w.]+)")
_LOGGED = re.compile(r"WARNING: All log messages|[IWEF]\d{4} ")
"""The pattern of the compiler's messages about itself."""
_SHOWN_CHARS = 500
"""The maximum number of characters of the compiler's output in an error."""

_CONFLUENT = "confluent_kafka.schema_registry.confluent"
_BUILT_IN: Mapping[str, Sequence[str]] = {
    "confluent/meta.proto": [f"{_CONFLUENT}.meta_pb2"],
    # The second one before confluent-kafka 2.16, under another file name.
    "confluent/type/decimal.proto": [
        f"{_CONFLUENT}.type.decimal_pb2",
        f"{_CONFLUENT}.types.decimal_pb2",
    ],
    **{
        f"google/type/{name}.proto": [f"google.type.{name}_pb2"]
        for name in ("date", "datetime", "dayofweek", "latlng", "money", "timeofday")
    },
}
"""The files that Confluent's registry contains itself, and so does not list as references.

Each has the modules that may contain it.
"""

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
"""The Arrow types by descriptor.proto's numbers. uint32 becomes wider, because few targets have it.
"""


@lru_cache(maxsize=64)
def compile_schema(schema: KeptSchema) -> bytes:
    """Return a schema and all its imports as a FileDescriptorSet, with the schema as the last file.

    Runs Protobuf's compiler as a process, which takes some tenths of a second. This process caches
    the results.

    Raises:
        ConfigError: The schema is not Protobuf, or the compiler is not installed or refuses it.
    """
    if schema.kind is not SchemaKind.PROTOBUF:
        raise ConfigError(f"its schema must be Protobuf, but is {schema.kind.value}")
    with tempfile.TemporaryDirectory(prefix="onceflow-proto-") as name:
        directory = Path(name)
        sources = [*schema.references, NamedSchema(_MAIN, schema.text)]
        ready = [*_laid_out(sources, directory), *_list_built_in(sources)]
        known = directory / "known.descriptors"
        known.write_bytes(_make_descriptor_set(ready))
        output = directory / "found.descriptors"
        _run_compiler(directory, known, output)
        return output.read_bytes()


def _laid_out(sources: Iterable[NamedSchema], directory: Path) -> Iterator[bytes]:
    """Write the texts of `sources` as files. Yield those that are compiled already."""
    for source in sources:
        descriptor = _descriptor_in(source)
        if descriptor is not None:
            yield descriptor
            continue
        path = directory / source.name
        if not path.resolve().is_relative_to(directory.resolve()):
            raise ConfigError(
                f"it imports {source.name!r}, a path outside the directory of its schemas; register"
                " the reference by a relative path without `..`"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.text, encoding="utf-8")


def _descriptor_in(source: NamedSchema) -> bytes | None:
    """Return the FileDescriptorProto that `source` contains in base64, or None if it is text."""
    descriptor_pb2 = _protobuf("descriptor_pb2")
    try:
        raw = base64.b64decode("".join(source.text.split()), validate=True)
        descriptor = descriptor_pb2.FileDescriptorProto.FromString(raw)
    except (binascii.Error, ValueError, _protobuf("message").DecodeError):
        return None
    # Imports use the name under which the reference is registered, whatever name its author used.
    descriptor.name = source.name
    return bytes(descriptor.SerializeToString())


def _list_built_in(sources: Iterable[NamedSchema]) -> Iterator[bytes]:
    texts = [source.text for source in sources]
    given = {source.name for source in sources}
    for name, modules in _BUILT_IN.items():
        if name not in given and any(name in text for text in texts):
            descriptor = _protobuf("descriptor_pb2").FileDescriptorProto.FromString(
                _import_first(modules).DESCRIPTOR.serialized_pb
            )
            descriptor.name = name
            yield descriptor.SerializeToString()


def _import_first(modules: Sequence[str]) -> Any:
    """Return the first of `modules` that is installed.

    Raises:
        MissingExtra: No module is installed.
    """
    *firsts, last = modules
    for module in firsts:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(module)
    with naming_one_extra(_EXTRA):
        return importlib.import_module(last)


def _make_descriptor_set(files: Iterable[bytes]) -> bytes:
    descriptor_pb2 = _protobuf("descriptor_pb2")
    descriptor_set = descriptor_pb2.FileDescriptorSet()
    for file in files:
        descriptor_set.file.add().MergeFromString(file)
    return bytes(descriptor_set.SerializeToString())


def _run_compiler(directory: Path, known: Path, output: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{directory}"),
            *(f"--descriptor_set_in={known}", "--include_imports"),
            *(f"--descriptor_set_out={output}", _MAIN),
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_COMPILE_S,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if not _LOGGED.match(line)]
        problem = "; ".join(lines).replace(f"{directory}/", "").replace(_MAIN, "the schema")
        if missing := _MISSING_MODULE.search(problem):
            raise make_missing(missing[1], _EXTRA)
        raise ConfigError(f"it does not compile: {problem[:_SHOWN_CHARS]}")


def _protobuf(module: str) -> Any:
    """Return a module of `google.protobuf`.

    Raises:
        MissingExtra: Protobuf is not installed.
    """
    with naming_one_extra(_EXTRA):
        return importlib.import_module(f"google.protobuf.{module}")


def messages_of(descriptors: bytes) -> dict[MessagePath, str]:
    """Return the full names of the messages in the schema compiled to `descriptors`, by path."""
    main: FileDescriptorProto = _files(descriptors)[-1]
    return dict(_name_messages(main.message_type, main.package, ()))


def _name_messages(
    messages: Iterable[DescriptorProto], space: str, outer: MessagePath
) -> Iterator[tuple[MessagePath, str]]:
    # Maps are messages only in descriptors. Java, which set this rule, does not count them.
    written = [message for message in messages if not message.options.map_entry]
    for at, message in enumerate(written):
        name = f"{space}.{message.name}".lstrip(".")
        yield (*outer, at), name
        yield from _name_messages(message.nested_type, name, (*outer, at))


def path_of(descriptors: bytes, message: str | None) -> MessagePath:
    """Return the path in its schema of the message called `message`, or of the first message.

    Raises:
        ConfigError: There is no such message, or the name is ambiguous.
    """
    messages = messages_of(descriptors)
    if not messages:
        raise ConfigError("its Protobuf schema has no message")
    if message is None:
        return next(iter(messages))
    # Look for the whole name first: the names of other messages may end with it.
    exact = [path for path, name in messages.items() if name == message]
    matching = exact or [path for path, name in messages.items() if name.endswith(f".{message}")]
    if len(matching) != 1:
        names = ", ".join(messages.values())
        raise ConfigError(f"message={message!r} names {len(matching)} of its messages: {names}")
    return matching[0]


def message_of(descriptors: bytes, message: str | None = None) -> Descriptor:
    """Return the message called `message`, or the first message, of a compiled schema.

    Raises:
        ConfigError: There is no such message, or Protobuf is not installed.
    """
    name = messages_of(descriptors)[path_of(descriptors, message)]
    return _find_message(_files(descriptors), name)


def message_with_numbers(descriptors: bytes, message: Descriptor) -> Descriptor:
    """Return `message` of a compiled schema with int32 instead of enums. The encoding is the same.

    So a number without a name in its enum can be read. If an enum is closed, as in proto2, Protobuf
    itself drops such a number: the field is absent, and a list or a map lacks a value.
    """
    files = _files(descriptors)
    for file in files:
        for message_type in file.message_type:
            _make_numbers(message_type)
    return _find_message(files, message.full_name)


def _make_numbers(message: DescriptorProto) -> None:
    for field in message.field:
        if field.type == field.TYPE_ENUM:
            field.type = field.TYPE_INT32
            field.ClearField("type_name")
            field.ClearField("default_value")
    for nested in message.nested_type:
        _make_numbers(nested)


def _find_message(files: Iterable[FileDescriptorProto], name: str) -> Descriptor:
    # Use a separate pool: in the default pool of the process two versions of a file would collide.
    pool = _protobuf("descriptor_pool").DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    descriptor: Descriptor = pool.FindMessageTypeByName(name)
    return descriptor


def class_of(message: Descriptor) -> Any:
    """Return the Python class of `message`."""
    return _protobuf("message_factory").GetMessageClass(message)


def decode_error() -> type[Exception]:
    """Return the exception type that classes of `class_of` raise for undecodable bytes."""
    error_type: type[Exception] = _protobuf("message").DecodeError
    return error_type


def encode_error() -> type[Exception]:
    """Return the exception type that messages of `class_of` raise if they lack a required field."""
    error_type: type[Exception] = _protobuf("message").EncodeError
    return error_type


def _files(descriptors: bytes) -> Any:
    return _protobuf("descriptor_pb2").FileDescriptorSet.FromString(descriptors).file


def columns_of_message(message: Descriptor, names: Iterable[str] | None = None) -> pa.Schema:
    """Return the columns of the fields of `message`, or of the fields called `names`.

    Raises:
        ConfigError: The message has no field of such a name, or a field is a message that contains
            itself.
    """
    fields = {field.name: field for field in message.fields}
    selected = list(fields if names is None else names)
    lost = [name for name in selected if name not in fields]
    if lost:
        raise ConfigError(
            f"message {message.full_name} has no fields {lost}, only {', '.join(fields)}"
        )
    columns: list[pa.Field] = []
    for name in selected:
        try:
            columns.append(_field(fields[name], (message.full_name,)))
        except ConfigError as error:
            raise ConfigError(
                f"{error}. Of a value, leave out the column {name!r} by schema="
            ) from error
    return pa.schema(columns)


def _field(field: FieldDescriptor, path: tuple[str, ...]) -> pa.Field:
    return pa.field(field.name, _type(field, path), nullable=is_nullable(field))


def is_repeated(field: FieldDescriptor) -> bool:
    """Return True if `field` is a list or a map."""
    described: Any = field
    # Protobuf 7 has no labels, and Protobuf 5 has only labels.
    repeated = getattr(described, "is_repeated", None)
    return bool(described.label == 3 if repeated is None else repeated)


def is_map(field: FieldDescriptor) -> bool:
    """Return True if `field` is a map."""
    message: Any = field.message_type
    return message is not None and bool(message.GetOptions().map_entry)


def is_nullable(field: FieldDescriptor) -> bool:
    """Return True if `field` can be absent."""
    return not is_repeated(field) and bool(field.has_presence)


def _type(field: FieldDescriptor, path: tuple[str, ...]) -> pa.DataType:
    if is_map(field):
        entry: Any = field.message_type
        key, value = (entry.fields_by_name[name] for name in ("key", "value"))
        return pa.map_(_single(key, path), pa.field("value", _single(value, path), nullable=False))
    single_type = _single(field, path)
    return (
        pa.list_(pa.field("item", single_type, nullable=False))
        if is_repeated(field)
        else single_type
    )


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
    return pa.struct([_field(member, inner) for member in message.fields])


_WIDER: Mapping[str, frozenset[str]] = {
    "bool": frozenset({"int32", "int64", "uint32", "uint64"}),
    "enum": frozenset({"int32", "int64"}),
    "int32": frozenset({"int64", "enum"}),
    "uint32": frozenset({"int64", "uint64"}),
    "sint32": frozenset({"sint64"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string"}),
}
"""The pairs of written and read types for which each value is read as itself, or refused.

Other pairs are misread without an error. For example, an int64 that is read as an int32 loses its
upper half. An int32 that is read as a string is empty, because its encoding differs.
"""
_TYPE_NAMES = (
    *("", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string"),
    *("group", "message", "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64"),
)
"""The names of types, by descriptor.proto's numbers."""


def find_reread(
    written: Descriptor, read: Descriptor, names: Iterable[str], path: frozenset[str] = frozenset()
) -> str | None:
    """Return a field of `written` that would be misread as one of `names` of `read`, or None.

    Fields match by number. `path` has the messages around these.
    """
    by_number: Mapping[int, FieldDescriptor] = written.fields_by_number
    for name in names:
        field = read.fields_by_name[name]
        before = by_number.get(field.number)
        fault = None if before is None else _reread_fault(before, field, path)
        if fault is not None:
            return fault
    return None


def _reread_fault(
    written: FieldDescriptor, read: FieldDescriptor, path: frozenset[str]
) -> str | None:
    before: Any = written
    after: Any = read
    old, new = _TYPE_NAMES[int(before.type)], _TYPE_NAMES[int(after.type)]
    is_reread = new != old and new not in _WIDER.get(old, ())
    if is_reread or (is_repeated(written) and not is_repeated(read)):
        what = " a list of" if is_repeated(written) and not is_repeated(read) else ""
        return (
            f"field {read.full_name} (number {read.number}) was written as{what} {old} and is"
            f" read as {new}, which would read the same bytes as other values. Give a new field a"
            " new number"
        )
    if after.message_type is None or after.message_type.full_name in path:
        return None
    names = [field.name for field in after.message_type.fields]
    inner = path | {str(after.message_type.full_name)}
    return find_reread(before.message_type, after.message_type, names, inner)


_FIRST_OF_PROTOBUF, _NEXT_OF_PROTOBUF = 19_000, 20_000
"""The range of numbers that Protobuf reserves."""

_WRITTEN: tuple[tuple[IsKind, str], ...] = (
    (arrow.is_boolean, "bool"),
    (arrow.is_int64, "int64"),
    (arrow.is_uint64, "uint64"),
    (arrow.is_uint32, "uint32"),
    (arrow.is_integer, "int32"),
    (arrow.is_float32, "float"),
    (arrow.is_float64, "double"),
    (is_bytes, "bytes"),
    (is_text, "string"),
    # No type of Protobuf: text, as in JSON.
    (arrow.is_decimal, "string"),
    (arrow.is_date, "string"),
    (arrow.is_time, "string"),
)
_KEYS = frozenset({"bool", "int64", "uint64", "uint32", "int32", "string"})


def protobuf_text(columns: pa.Schema, name: str, latest: Descriptor | None = None) -> str:
    """Return the schema of messages with `columns`, with the name `name`.

    Args:
        columns: The columns of the rows.
        name: The name of the message. If `latest` is given, its name is used instead.
        latest: The message of the subject's latest version. Its fields keep their numbers.

    Raises:
        ConfigError: A column has a name or a type that Protobuf does not have.
    """
    called = registry_schemas.to_schema_name(name) if latest is None else latest.name
    package = "" if latest is None else str(latest.file.package)
    if called[:1].isdigit():
        called = f"_{called}"
    body = "\n".join(_message_text(list(columns), called, latest, ""))
    head = ['syntax = "proto3";']
    if package:
        head.append(f"package {package};")
    if TIMESTAMP in body:
        head.append('import "google/protobuf/timestamp.proto";')
    return "\n".join([*head, body, ""])


def _message_text(
    fields: Sequence[pa.Field], name: str, latest: Descriptor | None, path: str
) -> Iterator[str]:
    """Yield the lines of a message with `fields`. Their paths in errors begin with `path`."""
    numbers = _Numbers(latest)
    yield f"message {name} {{"
    for field in fields:
        registry_schemas.check_field_name(field.name, "Protobuf", path)
        inner = inner_message(field.name, latest)
        inside: list[str] = []
        kind = _type_text(field, path, inner, inside)
        yield from (f"  {line}" for line in inside)
        is_many = is_list(field.type) or arrow.is_map(field.type)
        word = "optional " if field.nullable and not is_many else ""
        yield f"  {word}{kind} {field.name} = {numbers.of(field.name)};"
    for gone in numbers.list_removed([field.name for field in fields]):
        yield f"  reserved {', '.join(gone)};"
    yield "}"


class _Numbers:
    """The numbers of a message's fields."""

    def __init__(self, latest: Descriptor | None) -> None:
        self._known: dict[str, int] = {}
        self._reserved: list[tuple[int, int]] = []
        self._names: set[str] = set()
        if latest is not None:
            proto = to_proto(latest)
            self._known = {field.name: field.number for field in proto.field}
            self._reserved = [
                (reserved_range.start, reserved_range.end)
                for reserved_range in proto.reserved_range
            ]
            self._names = set(proto.reserved_name)
        # The number of a removed field is never reused: old readers would read the new values as
        # the old field.
        taken = [*self._known.values(), *(end - 1 for _, end in self._reserved)]
        self._last = max(taken, default=0)

    def of(self, name: str) -> int:
        """Return the number of a field: its current number, or the next free one."""
        if name not in self._known:
            self._last += 1
            if _FIRST_OF_PROTOBUF <= self._last < _NEXT_OF_PROTOBUF:
                self._last = _NEXT_OF_PROTOBUF
            self._known[name] = self._last
        return self._known[name]

    def list_removed(self, names: Iterable[str]) -> list[list[str]]:
        """Return the numbers and the names of removed fields, each list only if it is not empty."""
        present = set(names)
        lost = self._known.keys() - present
        ranges = [
            *self._reserved,
            *((self._known[lost_name], self._known[lost_name] + 1) for lost_name in lost),
        ]
        numbers = [
            str(start) if end == start + 1 else f"{start} to {end - 1}"
            for start, end in sorted(ranges)
        ]
        quoted = [f'"{name}"' for name in sorted((self._names | lost) - present)]
        return [listed for listed in (numbers, quoted) if listed]


def to_proto(message: Descriptor) -> Any:
    """Return the DescriptorProto from which `message` was created."""
    from google.protobuf.descriptor_pb2 import DescriptorProto

    proto = DescriptorProto()
    message.CopyToProto(proto)
    return proto


def inner_message(name: str, message: Descriptor | None) -> Descriptor | None:
    """Return the message type of the field's values, or None if it has none of its own."""
    field: Any = None if message is None else message.fields_by_name.get(name)
    if field is not None and is_map(field):
        field = field.message_type.fields_by_name["value"]
    inner: Descriptor | None = None if field is None else field.message_type
    if inner is None or inner.full_name == TIMESTAMP or inner.full_name in WRAPPERS:
        return None
    return inner


def _type_text(field: pa.Field, path: str, latest: Descriptor | None, inside: list[str]) -> str:
    """Return the type of a field. Add to `inside` the definition of its message."""
    kind, path = field.type, path + field.name
    single = partial(_single_text, name=field.name, latest=latest, inside=inside)
    if arrow.is_map(kind):
        key = single(kind.key_type, path)
        if key not in _KEYS:
            raise ConfigError(f"column {path!r} is {kind}, whose keys Protobuf does not have")
        return f"map<{key}, {single(kind.item_type, path + ENTRIES)}>"
    if is_list(kind):
        return f"repeated {single(kind.value_type, path + ITEMS)}"
    return single(kind, path)


def _single_text(
    kind: pa.DataType, path: str, *, name: str, latest: Descriptor | None, inside: list[str]
) -> str:
    """Return the type of a single value at `path`, for the field `name`."""
    kind = to_plain_type(kind)
    if arrow.is_struct(kind):
        called = f"{name}_message" if latest is None else latest.name
        inside += _message_text(list(kind), called, latest, f"{path}.")
        return called
    if arrow.is_timestamp(kind):
        return TIMESTAMP if kind.tz else "string"
    return registry_schemas.require_kind(kind, _WRITTEN, path, "Protobuf")
