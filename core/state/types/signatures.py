"""The name of a type in a state's signature, and its parser.

A name is equal in every process and for every import path.

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
from dataclasses import dataclass
from typing import Any, TypeAlias

from msgspec import inspect

from onceflow.core.decoding import type_info
from onceflow.core.errors import InvariantViolation

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


@dataclass(frozen=True, slots=True)
class NamedType:
    """A type without fields, or a class whose fields are not in the name."""

    word: str
    arguments: tuple[NamedTypes, ...] = ()

    def __str__(self) -> str:
        inside = ",".join(map(text_of, self.arguments))
        return f"{self.word}[{inside}]" if inside else self.word


@dataclass(frozen=True, slots=True)
class NameField:
    """The type of a field, and whether the field may be left out."""

    type: NamedTypes
    optional: bool


@dataclass(frozen=True, slots=True)
class ClassType:
    """A class with fields, which are in `ParsedName.fields[number]`.

    The fields are not stored here, because a class may contain itself.
    """

    word: str
    number: int

    def __str__(self) -> str:
        return self.word


NameElement: TypeAlias = "NamedType | ClassType"
NamedTypes: TypeAlias = "tuple[NameElement, ...]"
"""The alternatives of a union."""


@dataclass(frozen=True, slots=True)
class NameFields:
    """The fields of a class, in order, and whether values store them by position or by name."""

    by_position: bool
    named: dict[str, NameField]


def text_of(kind: NamedTypes) -> str:
    """Return a name for people, without the fields of classes."""
    return "|".join(map(str, kind))


class ParsedName:
    """A parsed name: its type, and the fields of the classes in it."""

    def __init__(self, name: str) -> None:
        self._tokens: list[str] = re.findall(r"[\[\]{}|,:?*]|[^\[\]{}|,:?*]+", name)
        self._at = 0
        self._classes = 0
        self.fields: dict[int, NameFields] = {}
        """The fields by the number of a class: number 1 is the first "{" in the name."""
        self.type = self._type()

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, token: str) -> bool:
        taken = self._next() == token
        self._at += taken
        return taken

    def _word(self) -> str:
        word = self._next()
        if not word:
            raise InvariantViolation(f"{''.join(self._tokens)} is not the name of a type")
        self._at += 1
        return word

    def _type(self) -> NamedTypes:
        alternatives = [self._element()]
        while self._take("|"):
            alternatives.append(self._element())
        return tuple(alternatives)

    def _element(self) -> NameElement:
        word = self._word()
        if self._take("{"):
            return self._class(word)
        arguments: list[NamedTypes] = []
        if self._take("["):
            while not self._take("]"):
                arguments.append(self._type())
                self._take(",")
        return NamedType(word, tuple(arguments))

    def _class(self, word: str) -> ClassType:
        if self._next().startswith("..."):
            number = int(self._word().removeprefix("..."))
            self._take("}")
            return ClassType(word, number)
        self._classes += 1
        number = self._classes
        by_position = self._take("*")
        named: dict[str, NameField] = {}
        while not self._take("}"):
            name, optional = self._word(), self._take("?")
            self._take(":")
            named[name] = NameField(self._type(), optional)
            self._take(",")
        self.fields[number] = NameFields(by_position, named)
        return ClassType(word, number)
