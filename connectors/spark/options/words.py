"""The translation of errors to the names of options: `primaryKey=id`, not `primary_key=('id',)`.

Sinks and sources name their arguments as in Python, where pipelines use them. A format's table of
options has the option for each argument. Every error that the format passes to Spark uses these
names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from typing_extensions import Self

from onceflow.core.errors import OnceflowError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_CALL = re.compile(r"\b[A-Z]\w+\((?:…, )?(\w+=[^()]*)\)")
"""A pattern for advice such as `PostgresSink(…, create=True)`, with the arguments as a group."""
_VALUE = (
    r"(?:'(?P<text>[^']*)'|(?P<flag>True|False)\b|\((?P<several>…|(?:'[^']*',? ?)*)\)"
    r"|\{'(?P<part>[\w.]+)': (?P<is>[^{}]*)\})?"
)

_WORDS_OF_JOBS = (
    (re.compile(r"\bcheckpoint \d+ was not pre-committed"), "its rows were not pre-committed"),
    (re.compile(r"\bsubtask (?=\d)"), "partition "),
)
"""Replacements for words of jobs. A batch has no checkpoint, so a checkpoint number would mislead.
"""


@dataclass(frozen=True, slots=True)
class OptionWords:
    """The names of one target's arguments as options. Pickles."""

    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The option for each argument; if empty, errors are not translated."""
    instead: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts about things that the format does not have, and their replacements."""

    def translate(self, text: str) -> str:
        """Return `text` with arguments and their values replaced by options and their values.

        An argument is recognized by the sign after its name, or by an underscore in it. A word in
        quotes, or a column name in SQL, is not replaced.
        """
        if not self.names:
            return text
        for pattern, replacement in _WORDS_OF_JOBS:
            text = pattern.sub(replacement, text)
        for named, replacement in self.instead.items():
            text = text.replace(named, replacement)
        # Put the longest first. Otherwise `table` would be found in `table_column`.
        by_length = sorted(self.names, key=len, reverse=True)
        given = rf"(?<![\w'\".])(?P<name>{'|'.join(by_length)})=(?!=){_VALUE}"
        # A name without an underscore may be an ordinary word of the sentence.
        bare = "|".join(name for name in by_length if "_" in name)
        text = re.sub(given, self._to_option, _CALL.sub(r"option \1", text))
        if not bare:
            return text
        alone = rf"(?<![\w'\"`.])(?<!COLUMN )({bare})(?![\w'\"`.=]| =)"
        return re.sub(alone, lambda match: self.names[match[1]], text)

    def _to_option(self, match: re.Match[str]) -> str:
        value = match["text"] or ""
        if match["flag"]:
            value = match["flag"].lower()
        elif match["several"]:
            value = ",".join(re.findall(r"'([^']*)'", match["several"])) or "…"
        name = self.names[match["name"]]
        if match["part"]:
            return f"{name.removesuffix('*')}{match['part']}={match['is']}"
        return f"{name}={value}"

    @contextmanager
    def translate_errors(self) -> Generator[None]:
        """Translate errors that leave the context, and their causes."""
        try:
            yield
        except OnceflowError as error:
            cause: BaseException | None = error
            seen: set[int] = set()
            # Python permits an error to be its own cause.
            while cause is not None and id(cause) not in seen:
                seen.add(id(cause))
                if isinstance(cause, OnceflowError) and cause.args:
                    cause.args = (self.translate(str(cause.args[0])), *cause.args[1:])
                # Spark prints the whole chain, so an untranslated cause would contradict the error.
                cause = cause.__cause__ or cause.__context__
            raise

    def over(self, made: Iterator[_T]) -> Iterator[_T]:
        """Yield the items of `made`, and translate its errors."""
        with self.translate_errors():
            yield from made


class Speaker:
    """An object that Spark calls, with the `words` for its errors. Pickles with them."""

    words = OptionWords()

    def speaking(self, words: OptionWords) -> Self:
        """Use `words` for errors from now on, and return itself."""
        self.words = words
        return self


_S = TypeVar("_S", bound=Speaker)


def in_option_words(
    method: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """Return `method`, which Spark calls, with its errors translated by the object's `words`."""

    @wraps(method)
    def call_translated(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.words.translate_errors():
            made = method(self, *args, **kwargs)
        # A generator raises while it is read, after this call has returned.
        if isinstance(made, Iterator):
            return cast("_R", self.words.over(cast("Iterator[object]", made)))
        return made

    return call_translated
