"""The name of a type in a state's signature: equal in every process and for every import path.

A class is named without its module, which may be `__main__` in one run and not in another, and with
its fields:

    type    ::= element ("|" element)*                             sorted
    element ::= word | word "[" type ("," type)* "]" | word "{" fields "}" | word "{..." number "}"
    fields  ::= ["*"] [field ("," field)*]                         "*": stored by position
    field   ::= word ["?"] ":" type                                "?": may be left out

`{...2}` is the class whose fields begin at the second "{" of the signature. So each class is
written once, and the names of classes that contain themselves or each other end. Characters of this
grammar and white space are escaped in words as `%` and their number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec import inspect

from onceflow.core.decoding import type_info

_WORDS: dict[type[inspect.Type], str] = {
    inspect.AnyType: "any",
    inspect.NoneType: "none",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bytes",
    inspect.ByteArrayType: "bytearray",
    inspect.MemoryViewType: "memoryview",
    inspect.DateTimeType: "datetime",
    inspect.TimeType: "time",
    inspect.DateType: "date",
    inspect.TimeDeltaType: "timedelta",
    inspect.UUIDType: "UUID",
    inspect.DecimalType: "Decimal",
    inspect.ExtType: "Ext",
    inspect.RawType: "Raw",
    inspect.ListType: "list",
    inspect.SetType: "set",
    inspect.FrozenSetType: "frozenset",
    inspect.VarTupleType: "tuple",
    inspect.TupleType: "tuple",
    inspect.DictType: "dict",
    inspect.LiteralType: "literal",
}
_RESERVED = re.compile(r"[\[\]{}|,:?*%\s]")


def type_name(python_type: Any) -> str:
    """Return the name of `python_type`.

    Raises:
        TypeError, NameError: MessagePack has no form for it, or a field's type cannot be found.
    """
    return _Names().of(type_info(python_type))


class _Names:
    """Names the types of one signature."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        """The numbers of classes that are written already, by id. Classes outlive this object."""

    def of(self, kind: inspect.Type) -> str:
        match kind:
            case inspect.UnionType(types=alternatives):
                return "|".join(map(self.of, sorted(alternatives, key=_word)))
            case inspect.StructType(array_like=True) | inspect.NamedTupleType():
                return self._class(kind, kind.fields, "*")
            case inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType():
                return self._class(kind, kind.fields, "")
            case _:
                inside = ",".join(self._arguments(kind))
                return f"{_word(kind)}[{inside}]" if inside else _word(kind)

    def _arguments(self, kind: inspect.Type) -> list[str]:
        """Return the names in brackets; none for a type without parts, or with parts of Any."""
        match kind:
            case inspect.LiteralType(values=values):
                return sorted(_escape(repr(value)) for value in values)
            case inspect.TupleType(item_types=items):
                return list(map(self.of, items))
            case inspect.CollectionType(item_type=item) if not isinstance(item, inspect.AnyType):
                ending = ["..."] if isinstance(kind, inspect.VarTupleType) else []
                return [self.of(item), *ending]
            case inspect.DictType(key_type=key, value_type=value):
                named = [self.of(key), self.of(value)]
                return [] if named == ["any", "any"] else named
            case _:
                return []

    def _class(self, kind: inspect.Type, fields: Sequence[inspect.Field], mark: str) -> str:
        if id(kind) in self._numbers:
            return f"{_word(kind)}{{...{self._numbers[id(kind)]}}}"
        self._numbers[id(kind)] = len(self._numbers) + 1
        names = (
            f"{_escape(field.encode_name)}{'' if field.required else '?'}:{self.of(field.type)}"
            for field in fields
        )
        return f"{_word(kind)}{{{mark}{','.join(names)}}}"


def _word(kind: inspect.Type) -> str:
    known = _WORDS.get(type(kind))
    if known is not None:
        return known
    named: Any = getattr(kind, "cls", type(kind))
    return _escape(str(named.__qualname__))


def _escape(text: str) -> str:
    """Return `text` escaped as a word. Different texts give different words."""
    return _RESERVED.sub(lambda match: f"%{ord(match[0]):02x}", text)
