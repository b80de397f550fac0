"""The table of all settings: their names, Flink's names, kinds and defaults.

Settings are read, checked and printed from this table (`OPTIONS`), and tests compare the documents
with it. Defaults come from the classes whose fields the options set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias, cast

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.restart import ExponentialDelay, FailureRate, FixedDelay
from onceflow.core.setting_values import seconds_of
from onceflow.core.settings import pipeline_settings
from onceflow.core.settings.pipeline_settings import Checkpointing
from onceflow.core.state import RocksDBBackend
from onceflow.core.storage.storage import INLINE_THRESHOLD_BYTES

Value: TypeAlias = str | int | float | bool | None

NONE = "none"
"""The word for None in files, because TOML has none."""
RESTART = ExponentialDelay(initial_delay_s=0.1, multiplier=2.0, max_delay_s=5.0)
"""The default strategy: the first restart comes after 0.1 s. While a server is down, the job
restarts every 5 s."""


class Kind(Enum):
    """The kinds of values."""

    DURATION = "a duration: 500 ms, 5 s, 10 min, 1 h, 1 d"
    SIZE = "a size: bytes as a number, or 20 kb, 64 mb, 1 gb (each 1,024 of the one before)"
    COUNT = "a whole number"
    NUMBER = "a number"
    FLAG = "true or false"
    TEXT = "text"
    CHOICE = "a word"


@dataclass(frozen=True, slots=True)
class Option:
    """A setting. `name` is its name here. `flink` are the names that Flink has or had for it."""

    name: str
    kind: Kind
    default: Value
    flink: tuple[str, ...] = ()
    words: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))
    """The accepted words of a choice, in lower case, and their values."""
    hints: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The hints that are shown for some of these words."""
    target: str = ""
    """The field that the setting sets. Its class is given by the first part of the name."""
    open_choice: bool = False
    """True if other packages may add words."""

    def parse(self, written: object, name: str) -> Value:
        """Parse the text or number `written` under `name`, which may be Flink's name.

        Raises:
            ConfigError: The value is invalid. The message says what is accepted.
        """
        # Test for "none" first, because it would not parse as a number or duration.
        if isinstance(written, str) and written.strip().lower() == NONE and self.takes_none:
            return None
        value: Value
        match self.kind:
            case Kind.DURATION:
                value = _duration(written, name, is_flink=name != self.name)
            case Kind.SIZE:
                value = _size(written, name)
            case Kind.COUNT:
                value = _number(written, name, int)
            case Kind.NUMBER:
                value = _number(written, name, float)
            case Kind.FLAG:
                value = _flag(written, name)
            case Kind.TEXT:
                value = _text(written, name)
            case Kind.CHOICE:
                value = self._parse_choice(_text(written, name), name)
        return value

    @property
    def takes_none(self) -> bool:
        """True if the option accepts None."""
        return self.kind is not Kind.CHOICE and (
            self.default is None or self.name in _NONE_BESIDES_A_DEFAULT
        )

    def to_text(self, value: Value) -> str:
        """Return `value` as text for a configuration file."""
        if value is None:
            return NONE
        if isinstance(value, bool):
            return str(value).lower()
        match self.kind:
            case Kind.DURATION:
                return duration_text(seconds_of(cast("float | str", value), setting=self.name))
            case Kind.SIZE:
                return size_text(cast("int", value))
            case _:
                return str(value)

    def _parse_choice(self, written: str, name: str) -> Value:
        word = written.strip().lower()
        if word in self.words:
            return self.words[word]
        if self.open_choice:
            return written.strip()
        raise ConfigError(f"{name}={written!r}: {_nearest(word, self.words)}")

    def hint(self, written: object) -> str | None:
        """Return the hint for the value `written`, or None."""
        return self.hints.get(written.strip().lower()) if isinstance(written, str) else None


def duration_text(seconds: float) -> str:
    """Return `seconds` in the largest unit that gives a whole number."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds and (seconds / size).is_integer():
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1000:g} ms" if seconds else "0 s"


def size_text(size_bytes: int) -> str:
    """Return `size_bytes` in the largest unit that gives a whole number."""
    for unit, size in (("gb", 1 << 30), ("mb", 1 << 20), ("kb", 1 << 10)):
        if size_bytes and size_bytes % size == 0:
            return f"{size_bytes // size} {unit}"
    return f"{size_bytes} b"


# --- values --------------------------------------------------------------------------------------

_BYTES_PER_UNIT = {
    **dict.fromkeys(("b", "bytes"), 1),
    **dict.fromkeys(("k", "kb", "kib", "kibibytes"), 1 << 10),
    **dict.fromkeys(("m", "mb", "mib", "mebibytes"), 1 << 20),
    **dict.fromkeys(("g", "gb", "gib", "gibibytes"), 1 << 30),
}
_SIZE = re.compile(r"\s*(\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def _build_refusal(name: str, written: object, kind: Kind) -> ConfigError:
    return ConfigError(f"{name}={written!r} is not {kind.value}")


def _duration(written: object, name: str, *, is_flink: bool) -> float:
    if isinstance(written, bool) or not isinstance(written, (int, float, str)):
        raise _build_refusal(name, written, Kind.DURATION)
    if isinstance(written, str):
        if re.fullmatch(r"\s*[\d.]+\s*", written):
            raise ConfigError(f"{name}={written!r} has no unit; write '{written.strip()} s', …")
        return seconds_of(written, setting=name)
    # Zero needs no unit.
    if is_flink and written != 0:
        raise ConfigError(
            f"{name}={written} has no unit: Flink would read milliseconds, and our own settings"
            f" seconds; write '{written} ms' or '{written} s'"
        )
    return seconds_of(written, setting=name)


def _size(written: object, name: str) -> int:
    # In Python True is an int, and would be parsed as one byte.
    if isinstance(written, int) and not isinstance(written, bool):
        size_bytes = written
    else:
        match = _SIZE.fullmatch(written) if isinstance(written, str) else None
        if match is None:
            raise _build_refusal(name, written, Kind.SIZE)
        unit = match[2].lower() or "b"
        if unit not in _BYTES_PER_UNIT:
            near = _nearest(unit, _BYTES_PER_UNIT)
            raise ConfigError(f"{name}={written!r}: the unit {match[2]!r} is unknown; {near}")
        size_bytes = int(match[1]) * _BYTES_PER_UNIT[unit]
    if size_bytes < 0:
        raise ConfigError(f"{name}={written!r} must be zero or more")
    return size_bytes


def _number(written: object, name: str, kind: type[int] | type[float]) -> int | float:
    expected = Kind.COUNT if kind is int else Kind.NUMBER
    if isinstance(written, bool) or not isinstance(written, (int, float, str)):
        raise _build_refusal(name, written, expected)
    # int() would silently truncate the fraction.
    if kind is int and isinstance(written, float):
        raise _build_refusal(name, written, expected)
    try:
        return kind(written)
    except ValueError:
        raise _build_refusal(name, written, expected) from None


def _flag(written: object, name: str) -> bool:
    if isinstance(written, bool):
        return written
    word = written.strip().lower() if isinstance(written, str) else ""
    if word not in {"true", "false"}:
        raise _build_refusal(name, written, Kind.FLAG)
    return word == "true"


def _text(written: object, name: str) -> str:
    if not isinstance(written, str) or not written.strip():
        raise _build_refusal(name, written, Kind.TEXT)
    return written.strip()


def _nearest(word: str, words: Mapping[str, object]) -> str:
    near = get_close_matches(word, words, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}there are {', '.join(words)}"


# --- the table -----------------------------------------------------------------------------------

_UNCHANGED = "unchanged"
"""The value of logging options that leave the program's own setup unchanged."""
_NONE_BESIDES_A_DEFAULT = frozenset(
    {
        "checkpointing.interval",
        "metrics.unhealthy_after_intervals",
        "restart.exponential_delay.same_mistakes",
        "restart.failure_rate.same_mistakes",
    }
)


def _read_default(holder: object, target: str) -> Value:
    """Return the field `target` of an object, or its default in a class."""
    if not isinstance(holder, type):
        return cast("Value", getattr(holder, target))
    (field,) = (
        candidate
        for candidate in fields(cast("type[Checkpointing]", holder))
        if candidate.name == target
    )
    if field.default is MISSING:
        return None
    return cast("Value", field.default.value if isinstance(field.default, Enum) else field.default)


def _option(
    name: str,
    kind: Kind,
    holder: object,
    *flink: str,
    target: str = "",
    words: Mapping[str, Value] = MappingProxyType({}),
) -> Option:
    target = target or name.rpartition(".")[2]
    default = _read_default(holder, target)
    if kind is Kind.DURATION and default is not None:
        default = seconds_of(cast("float | str", default), setting=name)
    return Option(name, kind, default, flink, words, target=target)


_DELIVERIES: Mapping[str, Value] = MappingProxyType(
    {
        "exactly_once": "exactly_once",
        "exactly-once": "exactly_once",
        "at_least_once": "at_least_once",
        "at-least-once": "at_least_once",
    }
)
_RETENTIONS: Mapping[str, Value] = MappingProxyType(
    {
        **dict.fromkeys(("retain", "retain_on_cancellation"), "retain"),
        **dict.fromkeys(
            ("delete", "delete_on_cancellation", "no_externalized_checkpoints"), "delete"
        ),
    }
)
_STRATEGIES: Mapping[str, Value] = MappingProxyType(
    {
        **dict.fromkeys(("none", "off", "disable"), "none"),
        **dict.fromkeys(("fixed_delay", "fixed-delay", "fixeddelay"), "fixed_delay"),
        **dict.fromkeys(
            ("exponential_delay", "exponential-delay", "exponentialdelay"), "exponential_delay"
        ),
        **dict.fromkeys(("failure_rate", "failure-rate", "failurerate"), "failure_rate"),
    }
)
_HEAP = "Flink's {} is our 'heap': state in the memory of the slots"
_ROCKSDB = "Flink's {} is our 'rocksdb'"
_BACKENDS: Mapping[str, Value] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "heap",
                "hashmap",
                "hashmapstatebackend",
                "memory",
                "memorystatebackend",
                "jobmanager",
                "fs",
                "fsstatebackend",
                "filesystem",
            ),
            "heap",
        ),
        **dict.fromkeys(
            (
                "rocksdb",
                "embeddedrocksdb",
                "embeddedrocksdbstatebackend",
                "rocksdbstatebackend",
            ),
            "rocksdb",
        ),
    }
)
_IN_MEMORY = (
    f"{_HEAP.format('memory backend')}; checkpoints go to checkpointing.storage, and only"
    " 'memory://' there keeps them in the driver's memory, too"
)
_IN_FILES = f"{_HEAP.format('file system backend')}; checkpoints go to checkpointing.storage"
_BACKEND_HINTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("hashmap", "hashmapstatebackend"), _HEAP.format("HashMap")),
        **dict.fromkeys(("memory", "memorystatebackend", "jobmanager"), _IN_MEMORY),
        **dict.fromkeys(("fs", "fsstatebackend", "filesystem"), _IN_FILES),
        **dict.fromkeys(
            ("embeddedrocksdb", "embeddedrocksdbstatebackend", "rocksdbstatebackend"),
            _ROCKSDB.format("EmbeddedRocksDB"),
        ),
    }
)
_CP = "execution.checkpointing."
_RS = "restart-strategy."
_ROCKS = "state.backend.rocksdb."
_D, _S, _C, _N, _F, _T, _W = (
    Kind.DURATION,
    Kind.SIZE,
    Kind.COUNT,
    Kind.NUMBER,
    Kind.FLAG,
    Kind.TEXT,
    Kind.CHOICE,
)
_MAX_DELAY = "restart.exponential_delay.max_delay"

OPTIONS: tuple[Option, ...] = (
    Option("pipeline.parallelism", _C, 1, ("parallelism.default",)),
    Option("pipeline.max_parallelism", _C, None, ("pipeline.max-parallelism",)),
    Option(
        "pipeline.allow_non_restored_state",
        _F,
        False,
        (
            "execution.state-recovery.ignore-unclaimed-state",
            "execution.savepoint.ignore-unclaimed-state",
        ),
    ),
    _option("checkpointing.storage", _T, Checkpointing, f"{_CP}dir", "state.checkpoints.dir"),
    _option("checkpointing.interval", _D, Checkpointing, f"{_CP}interval"),
    _option("checkpointing.timeout", _D, Checkpointing, f"{_CP}timeout"),
    _option("checkpointing.min_pause", _D, Checkpointing, f"{_CP}min-pause"),
    _option("checkpointing.max_concurrent", _C, Checkpointing, f"{_CP}max-concurrent-checkpoints"),
    _option(
        "checkpointing.tolerable_failures", _C, Checkpointing, f"{_CP}tolerable-failed-checkpoints"
    ),
    _option(
        "checkpointing.retained",
        _C,
        Checkpointing,
        f"{_CP}num-retained",
        "state.checkpoints.num-retained",
    ),
    _option("checkpointing.mode", _W, Checkpointing, f"{_CP}mode", words=_DELIVERIES),
    _option(
        "checkpointing.unaligned",
        _F,
        Checkpointing,
        f"{_CP}unaligned.enabled",
        f"{_CP}unaligned",
    ),
    _option(
        "checkpointing.aligned_checkpoint_timeout",
        _D,
        Checkpointing,
        f"{_CP}aligned-checkpoint-timeout",
        f"{_CP}alignment-timeout",
    ),
    _option(
        "checkpointing.ignore_in_flight_of",
        _C,
        Checkpointing,
        f"{_CP}recover-without-channel-state.checkpoint-id",
    ),
    _option(
        "checkpointing.savepoints",
        _T,
        Checkpointing,
        f"{_CP}savepoint-dir",
        "state.savepoints.dir",
    ),
    _option(
        "checkpointing.on_cancel",
        _W,
        Checkpointing,
        f"{_CP}externalized-checkpoint-retention",
        words=_RETENTIONS,
    ),
    Option(
        "storage.inline_threshold",
        _S,
        INLINE_THRESHOLD_BYTES,
        (f"{_CP}data-inline-threshold", "state.storage.fs.memory-threshold"),
    ),
    Option("storage.endpoint", _T, None, ("s3.endpoint",)),
    Option(
        "restore.savepoint", _T, None, ("execution.state-recovery.path", "execution.savepoint.path")
    ),
    Option(
        "restore.claim_mode",
        _W,
        "no_claim",
        ("execution.state-recovery.claim-mode", "execution.savepoint-restore-mode"),
        MappingProxyType({"no_claim": "no_claim", "claim": "claim"}),
    ),
    Option(
        "state_backend.type",
        _W,
        "heap",
        ("state.backend.type", "state.backend"),
        _BACKENDS,
        _BACKEND_HINTS,
        open_choice=True,
    ),
    _option(
        "state_backend.incremental",
        _F,
        RocksDBBackend,
        f"{_CP}incremental",
        "state.backend.incremental",
    ),
    _option("state_backend.directory", _T, RocksDBBackend, f"{_ROCKS}localdir"),
    _option("state_backend.cache_entries", _C, RocksDBBackend),
    _option(
        "state_backend.block_cache",
        _S,
        RocksDBBackend,
        f"{_ROCKS}block.cache-size",
        target="block_cache_bytes",
    ),
    _option(
        "state_backend.write_buffer",
        _S,
        RocksDBBackend,
        f"{_ROCKS}writebuffer.size",
        target="write_buffer_bytes",
    ),
    Option(
        "restart.strategy",
        _W,
        "exponential_delay",
        (f"{_RS}type", "restart-strategy"),
        _STRATEGIES,
    ),
    _option("restart.fixed_delay.attempts", _C, FixedDelay, f"{_RS}fixed-delay.attempts"),
    _option(
        "restart.fixed_delay.delay", _D, FixedDelay, f"{_RS}fixed-delay.delay", target="delay_s"
    ),
    _option(
        "restart.exponential_delay.initial_delay",
        _D,
        RESTART,
        f"{_RS}exponential-delay.initial-backoff",
        target="initial_delay_s",
    ),
    _option(
        "restart.exponential_delay.multiplier",
        _N,
        RESTART,
        f"{_RS}exponential-delay.backoff-multiplier",
    ),
    _option(_MAX_DELAY, _D, RESTART, f"{_RS}exponential-delay.max-backoff", target="max_delay_s"),
    _option(
        "restart.exponential_delay.jitter", _N, RESTART, f"{_RS}exponential-delay.jitter-factor"
    ),
    _option(
        "restart.exponential_delay.reset_after",
        _D,
        RESTART,
        f"{_RS}exponential-delay.reset-backoff-threshold",
        target="reset_after_s",
    ),
    _option(
        "restart.exponential_delay.attempts",
        _C,
        RESTART,
        f"{_RS}exponential-delay.attempts-before-reset-backoff",
    ),
    _option("restart.exponential_delay.same_mistakes", _C, RESTART),
    _option(
        "restart.failure_rate.failures",
        _C,
        FailureRate,
        f"{_RS}failure-rate.max-failures-per-interval",
    ),
    _option(
        "restart.failure_rate.interval",
        _D,
        FailureRate,
        f"{_RS}failure-rate.failure-rate-interval",
        target="interval_s",
    ),
    _option(
        "restart.failure_rate.delay", _D, FailureRate, f"{_RS}failure-rate.delay", target="delay_s"
    ),
    _option("restart.failure_rate.same_mistakes", _C, FailureRate),
    _option(
        "runtime.start_timeout", _D, pipeline_settings.RuntimeSettings, target="start_timeout_s"
    ),
    _option(
        "runtime.heartbeat_interval",
        _D,
        pipeline_settings.RuntimeSettings,
        "heartbeat.interval",
        target="heartbeat_interval_s",
    ),
    _option(
        "runtime.heartbeat_timeout",
        _D,
        pipeline_settings.RuntimeSettings,
        "heartbeat.timeout",
        target="heartbeat_timeout_s",
    ),
    _option(
        "runtime.cancel_timeout",
        _D,
        pipeline_settings.RuntimeSettings,
        "task.cancellation.timeout",
        target="cancel_timeout_s",
    ),
    _option("runtime.stop_on_signals", _F, pipeline_settings.RuntimeSettings),
    _option("runtime.stop_timeout", _D, pipeline_settings.RuntimeSettings, target="stop_timeout_s"),
    _option("runtime.channel_batches", _C, pipeline_settings.RuntimeSettings),
    _option("runtime.poll_timeout", _D, pipeline_settings.RuntimeSettings, target="poll_timeout_s"),
    _option(
        "runtime.commit_deadline", _D, pipeline_settings.RuntimeSettings, target="commit_deadline_s"
    ),
    _option("runtime.scratch_dir", _T, pipeline_settings.RuntimeSettings, "io.tmp.dirs"),
    _option("runtime.driver_host", _T, pipeline_settings.RuntimeSettings),
    _option("runtime.slot_host", _T, pipeline_settings.RuntimeSettings),
    _option(
        "runtime.tls",
        _W,
        pipeline_settings.RuntimeSettings,
        words=MappingProxyType({"auto": "auto", "on": "on", "off": "off"}),
    ),
    _option("endpoint.host", _T, pipeline_settings.Endpoint, "rest.bind-address"),
    _option("endpoint.port", _C, pipeline_settings.Endpoint, "rest.port"),
    _option("endpoint.token_file", _T, pipeline_settings.Endpoint),
    _option("endpoint.names", _T, pipeline_settings.Endpoint),
    _option("endpoint.certificate", _T, pipeline_settings.TlsFiles),
    _option("endpoint.key", _T, pipeline_settings.TlsFiles),
    _option("endpoint.authority", _T, pipeline_settings.TlsFiles),
    Option(
        "logging.format",
        _W,
        _UNCHANGED,
        words=MappingProxyType({"json": "json", "text": "text", _UNCHANGED: _UNCHANGED}),
        target="format",
    ),
    Option(
        "logging.level",
        _W,
        _UNCHANGED,
        words=MappingProxyType(
            {word: word for word in (*pipeline_settings.LOG_LEVELS, _UNCHANGED)}
        ),
        target="level",
    ),
    _option("logging.levels", _T, pipeline_settings.Logging),
    _option("metrics.prometheus.bind", _T, pipeline_settings.Metrics, target="prometheus_bind"),
    _option("metrics.names", _T, pipeline_settings.Metrics),
    _option("metrics.subtasks_max", _C, pipeline_settings.Metrics),
    _option("metrics.splits_max", _C, pipeline_settings.Metrics),
    _option("metrics.unhealthy_after_intervals", _C, pipeline_settings.Metrics),
    _option("otel.endpoint", _T, pipeline_settings.OpenTelemetry),
    _option("otel.metrics_interval", _D, pipeline_settings.OpenTelemetry),
)
