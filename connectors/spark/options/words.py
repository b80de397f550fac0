"""Errors of sinks and sources in the words of options: `primaryKey=id`, not `primary_key=('id',)`.

Sinks and sources name their arguments as Python does, for they are written in Python elsewhere. A
format's table of options says what each is called here; whatever passes out of the format to Spark
is told in these names.
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
"""Finds the advice in `PostgresSink(…, create=True)`: the arguments inside."""
_VALUE = (
    r"(?:'(?P<text>[^']*)'|(?P<flag>True|False)\b|\((?P<several>…|(?:'[^']*',? ?)*)\)"
    r"|\{'(?P<part>[\w.]+)': (?P<is>[^{}]*)\})?"
)

_WORDS_OF_JOBS = (
    (re.compile(r"\bcheckpoint \d+ was not pre-committed"), "its rows were not pre-committed"),
    (re.compile(r"\bsubtask (?=\d)"), "partition "),
)
"""What a job has, and a batch has not: a task's number as a checkpoint's would mislead."""


@dataclass(frozen=True, slots=True)
class OptionWords:
    """What the arguments of one target are called as options. Pickles."""

    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The option for each argument; empty: the target's own words stay."""
    instead: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the target says of things that the format has not, and what is said of them."""

    def spoken(self, text: str) -> str:
        """Return `text` with options in the place of arguments and their values as options'.

        An argument is told by the sign after its name, or by the underscore in it; what stands in
        quotes, or names a column in SQL, is not one.
        """
        if not self.names:
            return text
        for pattern, replacement in _WORDS_OF_JOBS:
            text = pattern.sub(replacement, text)
        for named, replacement in self.instead.items():
            text = text.replace(named, replacement)
        # The longest first: `table` would else be found in `table_column`.
        by_length = sorted(self.names, key=len, reverse=True)
        given = rf"(?<![\w'\".])(?P<name>{'|'.join(by_length)})=(?!=){_VALUE}"
        # Without an underscore it may be a word of the sentence.
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
        """Tell errors that pass out in these words, and what they come from, too."""
        try:
            yield
        except OnceflowError as error:
            cause: BaseException | None = error
            seen: set[int] = set()
            # Python lets an error be its own cause.
            while cause is not None and id(cause) not in seen:
                seen.add(id(cause))
                if isinstance(cause, OnceflowError) and cause.args:
                    cause.args = (self.spoken(str(cause.args[0])), *cause.args[1:])
                # Spark prints the whole chain, so a cause in Python's words would contradict its
                # effect.
                cause = cause.__cause__ or cause.__context__
            raise

    def over(self, made: Iterator[_T]) -> Iterator[_T]:
        """Yield what `made` does, its errors told in these words."""
        with self.translate_errors():
            yield from made


class Speaker:
    """Something that Spark calls, whose errors are told in `words`. Pickles with them."""

    words = OptionWords()

    def speaking(self, words: OptionWords) -> Self:
        """Return itself, speaking so from now on."""
        self.words = words
        return self


_S = TypeVar("_S", bound=Speaker)


def in_option_words(
    method: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """Return `method`, which Spark calls, with its errors told in the `words` of its object."""

    @wraps(method)
    def call_translated(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.words.translate_errors():
            made = method(self, *args, **kwargs)
        # A generator raises while it is read, after this call has returned.
        if isinstance(made, Iterator):
            return cast("_R", self.words.over(cast("Iterator[object]", made)))
        return made

    return call_translated
