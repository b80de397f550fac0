"""Where a Kafka source starts and ends, as the user says it: before any broker has been asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TypeAlias, cast

from onceflow.core.errors import ConfigError

EARLIEST = -2
"""Spark's number for it in explicit offsets."""
LATEST = -1


@dataclass(frozen=True, slots=True)
class Earliest:
    """The first record that the broker still has."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The end as of now: behind the last record that is committed."""


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first record of each partition at or after this time; the end where there is none."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """These offsets by topic and partition; -2 means earliest and -1 latest, as in Spark."""

    offsets: Mapping[str, Mapping[int, int]]


Offsets: TypeAlias = Earliest | Latest | AtTime | AtOffsets
OffsetsLike: TypeAlias = "str | datetime | Mapping[str, Mapping[int, int]]"


def offsets_of(given: OffsetsLike, *, setting: str) -> Offsets:
    """Return what `given` says: a word, a time, or offsets (a mapping, or Spark's JSON text).

    Raises:
        ConfigError: It says none of them, or a time without a zone.
    """
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise ConfigError(
                f"{setting}={given.isoformat()} has no time zone; write"
                " datetime(..., tzinfo=timezone.utc)"
            )
        since = given - datetime(1970, 1, 1, tzinfo=timezone.utc)
        return AtTime(since // timedelta(milliseconds=1))
    if isinstance(given, str):
        match given.strip().lower():
            case "earliest":
                return Earliest()
            case "latest":
                return Latest()
            case text if text.startswith("{"):
                return AtOffsets(_checked(_parsed(given, setting), setting))
            case _:
                raise ConfigError(
                    f"{setting}={given!r}: choose earliest, latest, a datetime, or offsets such as"
                    ' {"topic": {0: 23}}'
                )
    return AtOffsets(_checked(given, setting))


def _parsed(text: str, setting: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{setting}={text!r} is no JSON: {error}") from error


def _checked(given: object, setting: str) -> dict[str, dict[int, int]]:
    wanted = f'{setting}={given!r}: offsets look like {{"topic": {{0: 23, 1: -2}}}}'
    if not isinstance(given, Mapping):
        raise ConfigError(wanted)
    found: dict[str, dict[int, int]] = {}
    for topic, partitions in cast("Mapping[object, object]", given).items():
        if not isinstance(topic, str) or not isinstance(partitions, Mapping):
            raise ConfigError(wanted)
        try:
            found[topic] = {
                int(cast("str | int", partition)): int(cast("str | int", offset))
                for partition, offset in cast("Mapping[object, object]", partitions).items()
            }
        except (TypeError, ValueError) as error:
            raise ConfigError(wanted) from error
        for partition, offset in found[topic].items():
            if partition < 0 or offset < EARLIEST:
                raise ConfigError(f"{wanted}; partition {partition} at {offset} cannot be")
    return found
