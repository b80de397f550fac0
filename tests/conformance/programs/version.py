"""The changes of a pipeline between two starts of a job that keep its state.

Each start may have a later version than the one before. What a record meets is the version of the
attempt that has processed it for good; see `History`.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec


@dataclass(frozen=True)
class Version:
    """One way to write the pipeline of a program."""

    key: str = "key"
    """The name of the key column."""
    added: bool = False
    """Whether records have another column."""
    map_uid: str | None = None
    """The uid of a stateless operator before the work, if there is one."""
    is_reversed: bool = False
    """Whether aggregates are in another order, and `co_group` takes batches."""
    total: str = "total"
    """The name of an aggregate: under another one it begins anew."""
    states: int = 0
    """Which `STATES` a function has."""

    def changes_columns(self, other: Version) -> bool:
        """Tell whether records of `other` have other columns."""
        return (self.key, self.added) != (other.key, other.added)


@dataclass
class ProfileOfTwo:
    """The first version of the value that a function keeps for a key."""

    count: int = 0
    old: str = ""


@dataclass
class ProfileOfThree:
    """The profile with another field."""

    count: int = 0
    old: str = ""
    steps: int = 7


@dataclass
class WideProfile:
    """The profile with a wider type, without a field, and with another name of the class."""

    count: float = 0
    steps: int = 7


@dataclass
class OptionalProfile:
    """Still wider."""

    steps: int = 7
    count: float | None = 0


for _class in (ProfileOfTwo, ProfileOfThree, WideProfile, OptionalProfile):
    _class.__qualname__ = "Profile"


class FirstTally(msgspec.Struct):
    """The first version of the value that another state keeps for a key."""

    total: int = 0


class Tally(msgspec.Struct):
    """The tally with another name of its field."""

    amount: int = msgspec.field(name="total", default=0)


Tally.__qualname__ = FirstTally.__qualname__ = "Tally"


@dataclass(frozen=True)
class States:
    """The classes of a function's states, and which of these there are."""

    profile: Any
    tally: Any
    has_steps: bool
    has_seen: bool
    """Whether there is a state that the first version did not have."""
    lives_long: bool
    """Whether a state has a time to live."""


STATES = (
    States(ProfileOfTwo, FirstTally, has_steps=False, has_seen=False, lives_long=False),
    States(ProfileOfThree, FirstTally, has_steps=True, has_seen=True, lives_long=False),
    States(ProfileOfThree, Tally, has_steps=True, has_seen=True, lives_long=True),
    States(WideProfile, Tally, has_steps=True, has_seen=True, lives_long=True),
    States(OptionalProfile, Tally, has_steps=True, has_seen=True, lives_long=True),
)


def later_version(rng: random.Random, version: Version, *, may_rename_total: bool) -> Version:
    """Return a version that may follow `version`."""
    total = version.total
    if may_rename_total and rng.random() < 0.3:
        total += "_"
    return replace(
        version,
        key=rng.choice(["key", "clef"]),
        added=version.added or rng.random() < 0.4,
        map_uid=rng.choice([None, "same", "as-it-is"]),
        is_reversed=rng.random() < 0.5,
        total=total,
        states=rng.randint(version.states, len(STATES) - 1),
    )


@dataclass
class History:
    """Which version has processed which records for good."""

    versions: list[Version] = field(default_factory=lambda: [Version()])
    _processed: list[frozenset[int]] = field(default_factory=lambda: [frozenset[int]()])
    """By version the records that were processed before it."""

    @property
    def last(self) -> Version:
        """The version that runs."""
        return self.versions[-1]

    def begin(self, version: Version, processed: Collection[int]) -> None:
        """Go on with `version`, records `processed` being in the state that it begins with."""
        self.versions.append(version)
        self._processed.append(frozenset(processed))

    def version_of(self, record: int) -> Version:
        """Return the version that has processed a record."""
        return self.versions[self.number_of(record)]

    def number_of(self, record: int) -> int:
        """Return the number of the version that has processed a record."""
        later = enumerate(self._processed[1:])
        return next(
            (number for number, before in later if record in before), len(self.versions) - 1
        )
