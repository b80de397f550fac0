"""A parser for the type names of `signatures.type_name`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.errors import InvariantViolation


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
    """A class with fields: `ParsedName.fields[number]`. A class may contain itself."""

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
            raise InvariantViolation(f"{''.join(self._tokens)} does not read as the name of a type")
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
