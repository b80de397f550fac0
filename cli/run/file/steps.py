"""The steps of a connector file: the operator that a table describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from onceflow.cli.run.file.connectors import Table, make_lookup, name_table, split_table
from onceflow.cli.run.file.layout import (
    LOOKUP_JOIN,
    WINDOW,
    WINDOWS,
    LookupKeys,
    StepKeys,
    parse_aggregates,
    parse_orders,
)
from onceflow.cli.run.file.parameters import check_names, list_parameters, parse_record
from onceflow.core.api.stream import KeyedStream, Stream
from onceflow.core.errors import ConfigError


class Streams:
    """The streams that steps and sinks may use as input, in the order of the file."""

    def __init__(self) -> None:
        self._by_uid: dict[str, Stream] = {}
        self._sources: list[str] = []
        self._last_step: str | None = None

    def add_source(self, uid: str, stream: Stream) -> None:
        """Add the stream of a source, or of one of its outputs."""
        self._by_uid[uid] = stream
        self._sources.append(uid)

    def add_step(self, uid: str, stream: Stream) -> None:
        """Add the stream of a step, which is the default input of what comes next."""
        self._by_uid[uid] = stream
        self._last_step = uid

    def find(self, names: Sequence[str] | None, where: str) -> Stream:
        """Return the union of the streams `names`. Default: the last step, or the only source.

        Raises:
            ConfigError: No earlier stream has the name, or there are several sources and no name is
                given.
        """
        if names is None:
            return self._by_uid[self._find_default(where)]
        check_names(names, list(self._by_uid), f"{where}.input")
        first, *others = (self._by_uid[name] for name in names)
        return first.union(*others) if others else first

    def _find_default(self, where: str) -> str:
        if self._last_step is not None:
            return self._last_step
        if len(self._sources) == 1:
            return self._sources[0]
        raise ConfigError(
            f"{where}: input must be given, since there are several streams:"
            f" {', '.join(self._sources)}"
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """The table of a step, divided into what `StepKeys` describes and the tables inside."""

    uid: str
    where: str
    """The file and the name of the table, for errors."""
    keys: StepKeys
    window: object
    """The table of a window; None if there is none."""
    lookup: object
    """The table of a lookup join; None if there is none."""

    @property
    def kind(self) -> str:
        """The kind of step.

        Raises:
            ConfigError: The table has the keys of several kinds, or of none.
        """
        keys = self.keys
        kinds = {
            "sql": keys.sql,
            "filter or select": keys.filter or keys.select,
            "running": keys.running,
            "over": keys.over,
            "deduplicate": keys.deduplicate,
            "top_n": keys.top_n,
            WINDOW: self.window,
            LOOKUP_JOIN: self.lookup,
        }
        given = [kind for kind, value in kinds.items() if value is not None]
        if len(given) != 1:
            what = f"{' and '.join(given)} are" if given else "nothing is"
            raise ConfigError(f"{self.where}: {what} given; a step is one of {', '.join(kinds)}")
        return given[0]


def apply_step(streams: Streams, uid: str, table: Table, where: str) -> Stream:
    """Return the stream of the step `uid`, which `table` describes.

    Raises:
        ConfigError: A name or a value is wrong. The message has `where`, the name of the table.
    """
    check_names(list(table), [*list_parameters(StepKeys), WINDOW, LOOKUP_JOIN], where)
    inner = (WINDOW, LOOKUP_JOIN)
    own = {name: value for name, value in table.items() if name not in inner}
    keys, _, _ = split_table(own, StepKeys, where)
    step = _Step(uid, where, keys, table.get(WINDOW), table.get(LOOKUP_JOIN))
    stream = streams.find(keys.input, where)
    return name_table(where, lambda: _apply(stream, step))


def _apply(stream: Stream, step: _Step) -> Stream:
    kind, keys = step.kind, step.keys
    _check_keys(kind, keys, step.where)
    if kind == WINDOW:
        return _apply_window(stream, step)
    if kind == LOOKUP_JOIN:
        return _apply_lookup(stream, step)
    if kind in _KEYS_OF:
        return _apply_keyed_step(
            stream.key_by(*(keys.key_by or ())), kind, keys, step.uid, step.where
        )
    if keys.sql is not None:
        return stream.sql(keys.sql, uid=step.uid)
    columns = ", ".join(keys.select or ("*",))
    condition = f" WHERE {keys.filter}" if keys.filter else ""
    return stream.sql(f"SELECT {columns} FROM stream{condition}", uid=step.uid)


def _apply_lookup(stream: Stream, step: _Step) -> Stream:
    where = f"{step.where}.{LOOKUP_JOIN}"
    table = _require_table(step.lookup, where, "with the url of the database")
    keys, _, options = split_table(table, LookupKeys, where)
    lookup = make_lookup(keys.connector, options, where)
    return name_table(
        where,
        lambda: stream.lookup_join(
            lookup, keys.on, keys.how, ttl=keys.ttl, keys_max=keys.keys_max, uid=step.uid
        ),
    )


def _require_table(table: object, where: str, content: str) -> Table:
    """Return a copy of `table`, or raise ConfigError if it is none."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table {content}")
    return dict(cast("Table", table))


def _apply_keyed_step(
    stream: KeyedStream, kind: str, keys: StepKeys, uid: str, where: str
) -> Stream:
    """Return the stream of a step that has a key and no window."""
    by = parse_orders(keys.by or ())
    match kind:
        case "running":
            aggregates = parse_aggregates(keys.running or {}, f"{where}.running")
            return stream.running(uid=uid, ttl=keys.ttl, emit=keys.emit or "record", **aggregates)
        case "over":
            if keys.rows is None:
                raise ConfigError(f"{where}: over needs rows, the number of records")
            aggregates = parse_aggregates(keys.over or {}, f"{where}.over")
            emit = keys.emit or "record"
            return stream.over(
                keys.rows, by=by or None, ttl=keys.ttl, emit=emit, uid=uid, **aggregates
            )
        case "top_n":
            return stream.top_n(keys.top_n or 0, by=by, rank=keys.rank or "rank", uid=uid)
        case "deduplicate":
            if len(by) > 1 or not all(isinstance(order, str) for order in by):
                raise ConfigError(
                    f"{where}: deduplicate takes one column in by, without DESC; keep first or last"
                )
            column = str(by[0]) if by else None
            keep = keys.deduplicate or ""
            return stream.deduplicate(keep=keep, by=column, ttl=keys.ttl, uid=uid)
        case _:
            raise AssertionError(f"{kind} is no step with a key")


_KEYS_OF = {
    "running": {"key_by", "ttl", "emit"},
    "over": {"key_by", "rows", "by", "ttl", "emit"},
    "deduplicate": {"key_by", "by", "ttl"},
    "top_n": {"key_by", "by", "rank"},
    "window": {
        *("key_by", "time", "allowed_lateness", "aggregate", "early_records", "early_interval"),
    },
}


def _check_keys(kind: str, keys: StepKeys, where: str) -> None:
    """Raise ConfigError if a key is given that belongs to another kind of step."""
    allowed = _KEYS_OF.get(kind, set[str]())
    for name in dict.fromkeys(name for names in _KEYS_OF.values() for name in sorted(names)):
        if getattr(keys, name) not in (None, 0.0) and name not in allowed:
            owners = " or ".join(owner for owner, names in _KEYS_OF.items() if name in names)
            raise ConfigError(
                f"{where}: {name} belongs to a step with {owners}, and this step is {kind}; remove"
                f" {name}"
            )
    if "key_by" in allowed and not keys.key_by and kind != "window":
        raise ConfigError(f"{where}: {kind} needs key_by, the columns of the key")


def _apply_window(stream: Stream, step: _Step) -> Stream:
    uid, where, keys = step.uid, step.where, step.keys
    table = _require_table(step.window, f"{where}.window", f"with type: {', '.join(WINDOWS)}")
    name = table.pop("type", None)
    check_names([str(name)], list(WINDOWS), f"{where}.window.type")
    assigner = parse_record(WINDOWS[str(name)], table, f"{where}.window")
    aggregates = parse_aggregates(keys.aggregate or {}, f"{where}.aggregate")
    time, lateness = keys.time, keys.allowed_lateness
    early = {"early_records": keys.early_records, "early_interval": keys.early_interval}
    if not keys.key_by:
        for name, value in early.items():
            if value is not None:
                raise ConfigError(f"{where}: {name} needs key_by, the columns of the key")
        together = stream.window_all(assigner, time=time, allowed_lateness=lateness)
        return together.aggregate(uid=uid, **aggregates)
    windowed = stream.key_by(*keys.key_by).window(
        assigner,
        time=time,
        allowed_lateness=lateness,
        early_records=keys.early_records,
        early_interval=keys.early_interval,
    )
    return windowed.aggregate(uid=uid, **aggregates)
