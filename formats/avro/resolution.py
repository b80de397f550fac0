"""The conversion from the schema that wrote Avro records to the schema that reads them.

It also applies inside values. Members of records match by name or alias, and a missing member has
its default. A branch of a union matches the branch of the same type and name, in any position.
`Fitting` handles numbers that became wider, and members without a value or a default.

Source: Apache Avro 1.12 specification, Schema Resolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from onceflow.core.arrow.exact_arrays import InexactValue, exact_array
from onceflow.core.arrow.instants import map_entries
from onceflow.core.errors import ConfigError
from onceflow.formats import fitting
from onceflow.formats.avro.schema import (
    MISSING,
    AvroType,
    Entries,
    Fixed,
    Items,
    Member,
    Record,
    Scalar,
    Symbols,
    Union,
    arrow_type,
    is_null,
    is_nullable,
    values_of,
)

Owners: TypeAlias = NDArray[np.int64]
"""The row to which each value belongs, directly or nested; -1 if the value does not count."""

_Named: TypeAlias = Record | Symbols | Fixed
"""The types with names, by which branches of unions are distinguished."""

_PROMOTED: Mapping[str, tuple[str, ...]] = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


def resolve(
    values: pa.Array, written: AvroType, read: AvroType, owners: Owners, faults: fitting.Faults
) -> pa.Array:
    """Return `values` of `written` with the members and branches of `read`.

    Add to `faults` the rows with values that `read` cannot hold.
    """
    if written == read:
        return values
    resolved = values
    if isinstance(written, Union) or isinstance(read, Union):
        resolved = _resolve_union(values, _branches(written), _branches(read), owners, faults)
    elif isinstance(written, Record) and isinstance(read, Record):
        resolved = _resolve_record(values, written, read, owners, faults)
    elif isinstance(written, Items) and isinstance(read, Items):
        inside = _owners_inside(values, owners)
        items = resolve(values.flatten(), written.item, read.item, inside, faults)
        resolved = pa.ListArray.from_arrays(fitting.list_offsets(values), items)
    elif isinstance(written, Entries) and isinstance(read, Entries):
        resolved = _resolve_entries(values, written.value, read.value, owners, faults)
    if is_nullable(written) and not is_nullable(read):
        absent: Any = resolved.is_null().to_numpy(zero_copy_only=False)
        _tell(faults, owners[absent], "it has null where the schema that is read has a value")
    return resolved


def _owners_inside(values: pa.Array, owners: Owners) -> Owners:
    """Return the owner of each item of lists, or of each entry of maps."""
    inside: Owners = np.repeat(owners, fitting.list_lengths(values))
    return inside


def _tell(faults: fitting.Faults, owners: Owners, why: str) -> None:
    for row in owners[owners >= 0].tolist():
        faults.setdefault(row, why)


def _where(owners: Owners, valid: pa.Array) -> Owners:
    """Return the owner of each value, or -1 where `valid` is false."""
    return np.where(valid.to_numpy(zero_copy_only=False), owners, np.int64(-1))


def _branches(node: AvroType) -> tuple[AvroType, ...]:
    return values_of(node) if isinstance(node, Union) else (() if is_null(node) else (node,))


def _resolve_record(
    values: pa.Array, written: Record, read: Record, owners: Owners, faults: fitting.Faults
) -> pa.Array:
    structs = cast("pa.StructArray", values)
    inside = _where(owners, values.is_valid())
    old = {member.name: member for member in written.members}
    parts: list[pa.Array] = []
    fields: list[pa.Field] = []
    for member in read.members:
        source = find_source(member, old)
        if source is not None:
            part = resolve(structs.field(source.name), source.type, member.type, inside, faults)
        elif member.default is not MISSING:
            part = fitting.repeat_value(default_of(member), len(values))
        else:
            continue
        parts.append(part)
        fields.append(pa.field(member.name, part.type))
    if not parts:
        return values
    return pa.StructArray.from_arrays(parts, fields=fields, mask=values.is_null())


def find_source(member: Member, written: Mapping[str, Member]) -> Member | None:
    """Return the written member with the values of `member`, or None if there is none."""
    return next((written[name] for name in (member.name, *member.aliases) if name in written), None)


def _resolve_entries(
    values: pa.Array, written: AvroType, read: AvroType, owners: Owners, faults: fitting.Faults
) -> pa.Array:
    offsets = fitting.list_offsets(values)
    keys, items = map_entries(values)
    items = resolve(items, written, read, _owners_inside(values, owners), faults)
    kind = pa.map_(pa.string(), pa.field("value", items.type))
    maps: pa.Array = pa.MapArray.from_arrays(offsets, keys, items, type=kind)
    return maps


def _resolve_union(
    values: pa.Array,
    written: Sequence[AvroType],
    read: Sequence[AvroType],
    owners: Owners,
    faults: fitting.Faults,
) -> pa.Array:
    """Move each branch of a union to the branch that has its values. A plain type is one branch."""
    if not read:
        _tell(faults, _where(owners, values.is_valid()), "the schema that is read has only null")
        return pa.nulls(len(values))
    if len(written) > 1:
        olds = cast("pa.StructArray", values).flatten()
    else:
        olds = [values] if written else []
    members = [pa.nulls(len(values), arrow_type(node)) for node in read]
    for node, old in zip(written, olds, strict=True):
        target = _find_branch(node, read, alone=len(written) == len(read) == 1)
        if target is None:
            why = f"it has {_describe(node)} where the schema that is read has no such branch"
            _tell(faults, _where(owners, old.is_valid()), why)
            continue
        inside = _where(owners, old.is_valid())
        resolved = resolve(old, node, read[target], inside, faults)
        if len(read) == 1 and len(written) == 1:
            # There is only one type on each side, so `Fitting` decides whether it fits.
            return resolved
        late: fitting.Faults = {}
        fitted = fitting.fit_values(resolved, arrow_type(read[target]), late)
        for at, why in late.items():
            _tell(faults, inside[at : at + 1], why)
        members[target] = pc.coalesce(members[target], fitted)
    if len(members) == 1:
        return members[0]
    empty: Any = np.logical_and.reduce(
        [member.is_null().to_numpy(zero_copy_only=False) for member in members]
    )
    names = [f"member{at}" for at in range(len(members))]
    return pa.StructArray.from_arrays(members, names=names, mask=pa.array(empty))


def _find_branch(node: AvroType, branches: Sequence[AvroType], *, alone: bool) -> int | None:
    """Return the index of the branch that has the values of `node`, or None."""
    for matches in (_is_equal, _has_full_name, _has_alias, _has_short_name, _is_wider):
        for at, branch in enumerate(branches):
            if matches(node, branch):
                return at
    return 0 if alone else None


def _is_equal(written: AvroType, read: AvroType) -> bool:
    return written == read


def _has_full_name(written: AvroType, read: AvroType) -> bool:
    if isinstance(written, _Named) and isinstance(read, _Named):
        return _is_same_kind(written, read) and written.name == read.name
    if isinstance(written, Scalar) and isinstance(read, Scalar):
        return written.kind == read.kind
    return type(written) is type(read)


def _has_alias(written: AvroType, read: AvroType) -> bool:
    if not (isinstance(written, _Named) and isinstance(read, _Named)):
        return False
    return _is_same_kind(written, read) and written.name in read.aliases


def _has_short_name(written: AvroType, read: AvroType) -> bool:
    """Return True if both names are equal without namespaces: the type may have moved."""
    if not (isinstance(written, _Named) and isinstance(read, _Named)):
        return False
    is_moved = written.name.rpartition(".")[2] == read.name.rpartition(".")[2]
    return is_moved and _is_same_kind(written, read)


def _is_same_kind(written: _Named, read: _Named) -> bool:
    if isinstance(written, Fixed) and isinstance(read, Fixed):
        return written.size_bytes == read.size_bytes
    return type(written) is type(read)


def _is_wider(written: AvroType, read: AvroType) -> bool:
    if not (isinstance(written, Scalar) and isinstance(read, Scalar)):
        return False
    return read.kind in _PROMOTED.get(written.kind, ())


def _describe(node: AvroType) -> str:
    if not isinstance(node, _Named):
        return f"a value of {arrow_type(node)}"
    kind = {Record: "a record", Symbols: "a symbol of enum", Fixed: "a fixed"}[type(node)]
    return f"{kind} {node.name}"


def default_of(member: Member) -> pa.Array:
    """Return the default of `member`, which must have one, as an array of one value.

    Raises:
        ConfigError: The default does not fit the member's type.
    """
    kind = arrow_type(member.type)
    try:
        return exact_array([_default(member.type, member.default)], kind)
    except (InexactValue, TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"field {member.name!r} has the default {member.default!r}, which is no value of its"
            f" type, {kind}: {error}. Correct it in the schema"
        ) from error


def _default(node: AvroType, given: Any) -> Any:
    """Return the JSON default of a schema as a value for Arrow."""
    value = given
    match node:
        case Union():
            value = _default_of_union(node, given)
        case Record(members=members):
            value = {
                member.name: _default(member.type, _choose_default(member, given))
                for member in members
            }
        case Items(item=item):
            value = [_default(item, element) for element in given]
        case Entries(value=inner):
            value = [(key, _default(inner, entry)) for key, entry in given.items()]
        case Scalar(kind="bytes", arrow=kind) | Fixed(arrow=kind):
            # Schemas contain bytes as text with a character for each byte.
            raw = given.encode("latin-1")
            value = raw
            if pa.types.is_decimal(kind):
                number = int.from_bytes(raw, "big", signed=True)
                value = Decimal(number).scaleb(-kind.scale)
        case Scalar(kind="float" | "double"):
            # JSON has no NaN and no infinity, so schemas contain them as text.
            value = float(given)
        case Scalar() | Symbols():
            pass
    return value


def _choose_default(member: Member, given: Mapping[str, Any]) -> Any:
    value = given.get(member.name, member.default)
    if value is MISSING:
        raise LookupError(f"it lacks {member.name!r}")
    return value


def _default_of_union(union: Union, given: Any) -> Any:
    """Return a default of the first branch, or, since Avro 1.12, of any branch."""
    if given is None:
        return None
    branches = values_of(union)
    for at, branch in enumerate(branches):
        try:
            value = _default(branch, given)
            exact_array([value], arrow_type(branch))
        except (InexactValue, TypeError, ValueError, LookupError, AttributeError):
            continue
        return value if len(branches) == 1 else {f"member{at}": value}
    raise ValueError("no branch of its union has such values")
