"""The rules for options that a user passes to a client library: allowed ones and secret ones.

A connector declares them once, as `OptionRules`. The names of its client's options stay with the
connector.
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
    """The term for such an option in errors: "Kafka option"."""
    prefix: str
    """The optional prefix of a name, which is removed."""
    owned: Mapping[str, str]
    """The options that `owner` sets itself, each with what to give instead, or why nothing can be
    given."""
    owner: str
    foreign: Mapping[str, str]
    """The options known only to `foreign_client`, each with what to give instead."""
    foreign_client: str
    foreign_files: Mapping[str, str]
    """The endings of files that the client cannot read, each with the type of such a file, and what
    to give instead."""
    secret_parts: tuple[str, ...]
    """The parts of names whose options are never printed."""

    def accept(self, options: Mapping[str, OptionValue]) -> dict[str, str]:
        """Check `options` and return them under the client's names, as text.

        Raises:
            ConfigError: An option belongs to another client or to the owner; the error says what to
                give instead. Or an option is given twice.
        """
        accepted: dict[str, str] = {}
        for given, value in options.items():
            name = given.removeprefix(self.prefix)
            shown = f"{self.what} {given!r}"
            # Check foreign names before owned ones: the advice for another client's option is more
            # useful than the statement that the option cannot be set.
            if name in self.foreign:
                raise ConfigError(f"{shown} is {self.foreign_client}'s: {self.foreign[name]}")
            if name in self.owned:
                raise ConfigError(f"{shown} is set by {self.owner}: {self.owned[name]}")
            # Client libraries read `true`, not Python's `True`.
            text = str(value).lower() if isinstance(value, bool) else str(value)
            for ending, advice in self.foreign_files.items():
                if text.endswith(ending):
                    raise ConfigError(f"{shown} names {advice}")
            # With and without the prefix it is the same option, and it is not clear which of two
            # values would win.
            if accepted.setdefault(name, text) != text:
                raise ConfigError(f"{self.what} {name!r} is given twice, with different values")
        return accepted

    def resolve_secrets(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return `options` with the secrets that they refer to. Called when a client is opened.

        Raises:
            ConfigError: A reference cannot be resolved here.
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
                # An error of a client may quote its configuration, so hide values anywhere in the
                # text.
                text = text.replace(value, "***")
        return text

    def _is_secret(self, name: str) -> bool:
        return any(part in name.lower() for part in self.secret_parts)
