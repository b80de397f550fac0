"""Options that a user gives and a client library gets: which may be given, and which are secret.

A connector says so once, as `OptionRules`; what its client's options are called stays with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.errors import ConfigError
from onceflow.core.secret_references import follow_references

OptionValue: TypeAlias = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class OptionRules:
    """The options of one client that a user may set, and their names."""

    what: str
    """What errors call such an option: "Kafka option"."""
    prefix: str
    """May stand before any name, and is removed."""
    owned: Mapping[str, str]
    """Set by `owner` itself: what to give instead, or why nothing can be given."""
    owner: str
    foreign: Mapping[str, str]
    """Known only to `foreign_client`: what to give instead."""
    foreign_client: str
    foreign_files: Mapping[str, str]
    """Endings of files that the client cannot read: what such a file is, and what to give."""
    secret_parts: tuple[str, ...]
    """An option with one of them in its name is never printed."""

    def accept(self, options: Mapping[str, OptionValue]) -> dict[str, str]:
        """Check `options` and return them under the client's names, as text.

        Raises:
            ConfigError: One is another client's, or belongs to the owner; says what to give
                instead. Or one is given twice.
        """
        accepted: dict[str, str] = {}
        for given, value in options.items():
            name = given.removeprefix(self.prefix)
            shown = f"{self.what} {given!r}"
            # Foreign names before owned ones: advice for another client's option says more than
            # that it cannot be set.
            if name in self.foreign:
                raise ConfigError(f"{shown} is {self.foreign_client}'s: {self.foreign[name]}")
            if name in self.owned:
                raise ConfigError(f"{shown} is set by {self.owner}: {self.owned[name]}")
            # Client libraries read `true`, and not Python's `True`.
            text = str(value).lower() if isinstance(value, bool) else str(value)
            for ending, advice in self.foreign_files.items():
                if text.endswith(ending):
                    raise ConfigError(f"{shown} names {advice}")
            # With and without the prefix it is one option, and which of two values would win is
            # nobody's guess.
            if accepted.setdefault(name, text) != text:
                raise ConfigError(f"{self.what} {name!r} is given twice, with different values")
        return accepted

    def resolve_secrets(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return `options` with the secrets that they refer to. Called when a client is opened.

        Raises:
            ConfigError: One cannot be followed here.
        """
        return {
            name: follow_references(value, setting=f"{self.what} {name!r}")
            for name, value in options.items()
        }

    def printable(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return `options` with every secret value hidden."""
        return {name: "***" if self._is_secret(name) else value for name, value in options.items()}

    def without_secrets(self, text: str, options: Mapping[str, str]) -> str:
        """Return `text` with every secret value of `options` hidden in it."""
        for name, value in self.resolve_secrets(options).items():
            if self._is_secret(name) and value:
                # An error of a client may quote its configuration, so values are hidden wherever
                # they stand.
                text = text.replace(value, "***")
        return text

    def _is_secret(self, name: str) -> bool:
        return any(part in name.lower() for part in self.secret_parts)
