"""The settings of a pipeline. They are checked when the pipeline is built, not at first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.setting_values import (
    Seconds,
    accept_durations,
    choice_of,
    declare_seconds,
    seconds_of,
)

if TYPE_CHECKING:
    from onceflow.core.storage import CheckpointStorage

_Settings = TypeVar("_Settings", bound="type[Any]")


class Delivery(Enum):
    """The delivery guarantee of a job or a sink: how often each record takes effect."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"


class OnCancel(Enum):
    """The action for a job's checkpoints when its user cancels it."""

    RETAIN = "retain"
    DELETE = "delete"


def _remembers_what_is_given(settings: _Settings) -> _Settings:
    """Make the dataclass `settings` record in `given` which fields the program has set.

    A configuration file overrides a default value, but not the same value set by the program.
    """
    initialize: Callable[..., None] = settings.__init__
    names = [settings_field.name for settings_field in fields(settings) if settings_field.init]

    @wraps(initialize)
    def remembering(self: object, *values: object, **by_name: object) -> None:
        object.__setattr__(self, "given", frozenset((*names[: len(values)], *by_name)))
        initialize(self, *values, **by_name)

    setattr(settings, "__init__", remembering)  # noqa: B010 - a type checker minds assignment
    return settings


@_remembers_what_is_given
@check_fields
@dataclass(frozen=True, slots=True)
class Checkpointing:
    """The settings of checkpoints: their times, their storage and the tolerated failures.

    Durations are seconds or text ("5 s", "500 ms", "10 min"). `storage` is a directory (a path or a
    `file://` URL) that the driver and every executor can access, a bucket (`s3://bucket/prefix`,
    `gs://…`, `az://…`), `memory://`, or a `FileSystemStorage`, `ObjectStorage` or `MemoryStorage`.
    If `storage` is None, it comes from the configuration (`Configuration`), like every field that
    is not given.
    """

    storage: str | CheckpointStorage | None = None
    interval: float | str | None = "10 s"
    """The time between two triggers. None: only on request, at the end of bounded input and on
    stop."""
    timeout: float | str = "10 min"
    min_pause: float | str = 0.0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    """The number of consecutive checkpoints that may fail before the attempt fails."""
    retained: int = 1
    mode: Delivery | str = Delivery.EXACTLY_ONCE
    unaligned: bool = False
    """True if barriers overtake the rows queued in channels, and the checkpoint stores these rows.
    Slow sinks then do not delay checkpoints. Needs `exactly_once` and `max_concurrent=1`."""
    aligned_checkpoint_timeout: float | str = 0.0
    """The time that a barrier waits before it overtakes rows, with `unaligned`. 0: no wait."""
    ignore_in_flight_of: int | None = None
    """The number of a checkpoint. If the job is restored from it, the rows in flight are lost
    instead of replayed. Use it if these rows cannot be read, or if no operator takes them any
    more."""
    savepoints: str | None = None
    """The default directory for savepoints. None: `<storage>/<job>/savepoints`."""
    on_cancel: OnCancel | str = OnCancel.RETAIN
    """The action when a user cancels the job. RETAIN: a later start continues from the last
    checkpoint. DELETE: the checkpoints are deleted, and a later start begins without state. A
    failed or killed job always keeps its checkpoints."""
    given: frozenset[str] = field(init=False, repr=False, compare=False)
    """The fields that the program has set."""

    def __post_init__(self) -> None:
        self.settings()
        self.deletes_on_cancel()
        if self.delivery() is not Delivery.EXACTLY_ONCE and self.unaligned:
            raise ConfigError(
                "Checkpointing: unaligned=True needs mode='exactly_once': at_least_once waits for"
                " no channel, so there is nothing to overtake"
            )
        # With several barriers, a row that one barrier has overtaken could belong to both
        # checkpoints or to none.
        if self.unaligned and self.max_concurrent > 1:
            raise ConfigError(
                f"Checkpointing: unaligned=True and max_concurrent={self.max_concurrent}: a newer"
                " barrier would overtake an older one; set max_concurrent=1"
            )
        if not self.unaligned and self._parse_aligned_timeout_s():
            raise ConfigError(
                "Checkpointing: aligned_checkpoint_timeout="
                f"{self.aligned_checkpoint_timeout!r} says when barriers begin to overtake, and"
                " unaligned=False says that they never do: set unaligned=True"
            )

    def settings(self) -> CheckpointSettings:
        """Return these settings as the protocol's `CheckpointSettings`.

        Raises:
            ConfigError: A value is out of range. The message names it.
        """
        try:
            return CheckpointSettings(
                interval_s=None
                if self.interval is None
                else seconds_of(self.interval, setting="interval"),
                timeout_s=seconds_of(self.timeout, setting="timeout"),
                min_pause_s=seconds_of(self.min_pause, setting="min_pause"),
                max_concurrent=self.max_concurrent,
                tolerable_failures=self.tolerable_failures,
                retained=self.retained,
                overtakes_after_s=self._parse_aligned_timeout_s() if self.unaligned else None,
            )
        except ValueError as error:
            raise ConfigError(f"Checkpointing: {error}") from error

    def _parse_aligned_timeout_s(self) -> float:
        return seconds_of(self.aligned_checkpoint_timeout, setting="aligned_checkpoint_timeout")

    def delivery(self) -> Delivery:
        """Return the mode as a `Delivery`."""
        return choice_of(Delivery, self.mode, setting="mode")

    def deletes_on_cancel(self) -> bool:
        """Return True if checkpoints are deleted when the job is cancelled."""
        return choice_of(OnCancel, self.on_cancel, setting="on_cancel") is OnCancel.DELETE

    def checkpoint_storage(self) -> CheckpointStorage:
        """Return the checkpoint storage described by `storage`.

        Raises:
            ConfigError: `storage` is None or does not describe a checkpoint storage.
        """
        if self.storage is None:
            raise ConfigError("Checkpointing: storage is missing: a directory or a bucket's URL")
        from onceflow.core.storage import checkpoint_storage

        return checkpoint_storage(self.storage)


@check_fields
@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of the user's own certificates, at the same paths on all machines of the job.

    A slot is a client of the driver, and both client and server to other slots. So `certificate`
    must be valid for both uses.
    """

    certificate: str
    """The certificate of the process that reads it, with the chain up to the authority."""
    key: str
    authority: str
    """The certificate of the authority that has signed the certificates of all other processes."""
    server_name: str | None = None
    """The name that every certificate must have, or None for the host or address of the
    connection."""


@check_fields
@dataclass(frozen=True, slots=True)
class Endpoint:
    """The HTTP endpoint of the driver, which answers queries about the job and takes commands.

    Bodies are JSON. Every request needs the token, even to read: a status has hosts and paths, and
    its errors quote records. Each driver draws a new token and stores it with the job's
    checkpoints, where `onceflow` finds it. Only the driver's user can read it. Anyone who can read
    that file controls the job.
    """

    host: str = "127.0.0.1"
    """The address to listen at. An address other than loopback needs `tls`."""
    port: int = 0
    """The port to listen at. 0: any free port."""
    token_file: str | None = None
    """A file on the driver's machine for the token, with mode 0600. It is created if it does not
    exist. Use it if many users can read the checkpoint storage."""
    tls: TlsFiles | None = None
    """The certificate of the server. Clients need no certificate, because they have the token."""
    names: str | None = None
    """Additional host names that clients may use, separated by commas. IP addresses, `localhost`,
    `host` and the machine's own name are always accepted. Other names are refused, because a web
    site could make its name resolve to this address."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"Endpoint: port={self.port} must be in 0-65535")
        if self.tls is None and not self.is_loopback:
            raise ConfigError(
                f"Endpoint: host={self.host!r} can be reached by other machines, and the token"
                " would be sent unencrypted: add tls=TlsFiles(…), or omit host"
            )

    @property
    def is_loopback(self) -> bool:
        """True if only processes on the same machine can reach the endpoint."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return True if `host` is a loopback address."""
    return host in {"localhost", "::1"} or host.startswith("127.")


@check_fields
@dataclass(frozen=True, slots=True)
class Metrics:
    """The settings of metrics for Prometheus, in addition to `/metrics` of the driver's endpoint.

    Metrics need the extra `onceflow[metrics]` on the driver. They contain no secrets, only names of
    jobs, operators and splits, and numbers.
    """

    prometheus_bind: str | None = None
    """The `host:port` at which the driver serves `/metrics` without a token, or None for no
    address. Jobs of one process may share an address."""
    names: str | None = None
    """Additional host names that clients may use there, separated by commas. IP addresses,
    `localhost`, the host of `prometheus_bind` and the machine's own name are always accepted. Other
    names are refused."""
    subtasks_max: int = 200
    """The number of subtasks up to which each has its own series. Beyond it, series are summed by
    chain."""
    splits_max: int = 200
    """The number of splits of a source up to which each has its own lag. Beyond it, lags are
    summed."""
    unhealthy_after_intervals: int | None = 30
    """The number of checkpoint intervals without a completed checkpoint, plus one timeout, after
    which `/healthz` returns 503. None: never."""

    def __post_init__(self) -> None:
        self.parse_bind()
        if self.unhealthy_after_intervals is not None and self.unhealthy_after_intervals < 1:
            raise ConfigError(
                f"Metrics: unhealthy_after_intervals={self.unhealthy_after_intervals} must be 1 or"
                " more, or none"
            )
        for name in ("subtasks_max", "splits_max"):
            if getattr(self, name) < 0:
                raise ConfigError(f"Metrics: {name}={getattr(self, name)} must be 0 or more")

    def parse_bind(self) -> tuple[str, int] | None:
        """Return the host and port of `prometheus_bind`, or None if it is not set.

        Raises:
            ConfigError: It is not an address with a port.
        """
        if self.prometheus_bind is None:
            return None
        # Split at the last colon, because an IPv6 address in brackets contains colons.
        host, colon, port = self.prometheus_bind.rpartition(":")
        # isdecimal() alone also accepts digits of other scripts.
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) <= 65_535
        if not colon or not host or not is_port:
            raise ConfigError(
                f"Metrics: prometheus_bind={self.prometheus_bind!r} is not host:port, with a port"
                " in 1-65535: write 127.0.0.1:9249, or 0.0.0.0:9249 for every address"
            )
        return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class OpenTelemetry:
    """The settings for sending a job's spans and metrics. Only the configuration can set them.

    Needs the extra `onceflow[otel]` on the driver. Headers and certificates come from the SDK's
    variables OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE.
    """

    endpoint: str | None = None
    """The URL of an OTLP/HTTP collector, such as http://collector:4318. None: nothing is sent."""
    metrics_interval: float | str = "30 s"
    """The time between two exports of all metrics."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otel.endpoint={self.endpoint!r} is not a URL: write http://collector:4318; OTLP"
                " is sent over HTTP, not gRPC"
            )
        if self.parse_interval_s() <= 0:
            raise ConfigError(f"otel.metrics_interval={self.metrics_interval!r} must be over 0")

    def parse_interval_s(self) -> float:
        """Return the interval in seconds."""
        return seconds_of(self.metrics_interval, setting="otel.metrics_interval")


LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Logging:
    """The settings of the loggers below `onceflow`. Only the configuration can set them."""

    format: Literal["json", "text"] | None = None
    """The format of lines on stderr. None: the handlers of the program, or Python's default
    handler."""
    level: LogLevel | None = None
    """The lowest level that is logged. None: the level that the program has set, or warning."""
    levels: str | None = None
    """The levels of single loggers: `onceflow.events=info,onceflow.runtime.lag=error`."""

    def __post_init__(self) -> None:
        self.parse_levels()

    def parse_levels(self) -> dict[str, str]:
        """Return a mapping from logger name to its level in upper case.

        Raises:
            ConfigError: An entry is not a logger of onceflow with a level.
        """
        levels = {} if self.level is None else {"onceflow": self.level.upper()}
        for entry in (self.levels or "").split(","):
            name, equals, level = (part.strip() for part in entry.partition("="))
            if not name and not equals:
                continue
            is_own = name == "onceflow" or name.startswith("onceflow.")
            if not is_own or level.lower() not in LOG_LEVELS:
                raise ConfigError(
                    f"logging.levels={self.levels!r}: {entry.strip()!r} is not a logger of"
                    " onceflow with one of the levels debug, info, warning, error: write"
                    " onceflow.events=info"
                )
            levels[name] = level.upper()
        return levels


@accept_durations
@_remembers_what_is_given
@check_fields
@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """The timeouts and limits of the runtime. The defaults suit one machine and a small cluster."""

    start_timeout_s: Seconds = declare_seconds(120.0)
    """The time from submitting the slots until all slots have registered."""
    heartbeat_interval_s: Seconds = declare_seconds(1.0)
    heartbeat_timeout_s: Seconds = declare_seconds(30.0)
    """The time without heartbeats after which the driver considers a slot lost, and a slot the
    driver."""
    cancel_timeout_s: Seconds = declare_seconds(10.0)
    """The time that a cancelled slot may take before Spark is asked to kill it."""
    stop_on_signals: bool = True
    """True if SIGINT and SIGTERM stop the job while the program waits for it. See `Job.wait`."""
    stop_timeout_s: Seconds = declare_seconds(30.0)
    """The time that a stop by a signal may take before the job is cancelled. Choose less than the
    sender of the signal waits before SIGKILL (Docker 10 s, Kubernetes 30 s, systemd 90 s)."""
    channel_batches: int = 8
    """The credits of a channel: the number of batches that may be in transit or queued in it."""
    poll_timeout_s: Seconds = declare_seconds(0.01)
    commit_deadline_s: Seconds = declare_seconds(120.0)
    scratch_dir: str | None = None
    """The directory for working files of slots. Default: a temporary directory, deleted with the
    slot."""
    driver_host: str | None = None
    """The address at which slots reach the driver. Default: the driver's address in Spark."""
    slot_host: str | None = None
    """The address at which other slots reach a slot. Each slot resolves a reference such as
    `${env:SLOT_HOST}` itself. Default: the address of its host name, or else of its route to the
    driver."""
    tls: Literal["auto", "on", "off"] | TlsFiles = "auto"
    """Mutual TLS between driver and slots. "on": each attempt creates its own certificates. "auto":
    like "on", except with a local master, where all traffic stays on one machine."""
    given: frozenset[str] = field(init=False, repr=False, compare=False)
    """The fields that the program has set."""

    def __post_init__(self) -> None:
        if not isinstance(self.tls, TlsFiles) and self.tls not in {"auto", "on", "off"}:
            raise ConfigError(f"tls={self.tls!r} must be 'auto', 'on', 'off' or TlsFiles(…)")
        if self.stop_timeout_s <= 0:
            raise ConfigError(f"stop_timeout_s={self.stop_timeout_s} must be over 0")
        if self.channel_batches < 1:
            raise ConfigError(f"channel_batches={self.channel_batches} must be 1 or more")
        # A single late heartbeat must not look like a lost slot.
        if self.heartbeat_timeout_s <= 2 * self.heartbeat_interval_s:
            raise ConfigError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s} must be over twice"
                f" heartbeat_interval_s={self.heartbeat_interval_s}"
            )
