"""What a user sets for a pipeline, checked when it is built and not when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

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
    """How often each record takes effect, whatever fails: the promise of a job, or of one sink."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"


class OnCancel(Enum):
    """What becomes of the checkpoints of a job that its user cancels."""

    RETAIN = "retain"
    DELETE = "delete"


def _remembers_what_is_given(settings: _Settings) -> _Settings:
    """Let objects of the dataclass `settings` know in `given` which fields the program has set.

    A default is weaker than a configuration file, and the same value in the program is not.
    """
    initialize: Callable[..., None] = settings.__init__
    names = [one.name for one in fields(settings) if one.init]

    @wraps(initialize)
    def remembering(self: object, *values: object, **by_name: object) -> None:
        object.__setattr__(self, "given", frozenset((*names[: len(values)], *by_name)))
        initialize(self, *values, **by_name)

    setattr(settings, "__init__", remembering)  # noqa: B010 - a type checker minds assignment
    return settings


@_remembers_what_is_given
@dataclass(frozen=True, slots=True)
class Checkpointing:
    """When checkpoints are taken, where they live and how many failures are borne.

    Durations are seconds or text ("5 s", "500 ms", "10 min"). `storage` is a directory (a path or a
    `file://` URL) that the driver and every executor see, a bucket (`s3://bucket/prefix`, `gs://…`,
    `az://…`), `memory://`, or a `FileSystemStorage`, `ObjectStorage` or `MemoryStorage`; None: as
    configured (`Configuration`), like every field that is left open.
    """

    storage: str | CheckpointStorage | None = None
    interval: float | str | None = "10 s"
    """From trigger to trigger; None = only on request, at the end of bounded input and on stop."""
    timeout: float | str = "10 min"
    min_pause: float | str = 0.0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    """How many checkpoints in a row may fail before the attempt does."""
    retained: int = 1
    mode: Delivery | str = Delivery.EXACTLY_ONCE
    unaligned: bool = False
    """Whether barriers overtake the rows that wait in channels, which are then part of the
    checkpoint: it takes no longer when sinks are slow. Needs `exactly_once` and one at a time."""
    aligned_checkpoint_timeout: float | str = 0.0
    """With `unaligned`: how long a barrier waits its turn before it overtakes; 0 = not at all."""
    ignore_in_flight_of: int | None = None
    """The number of a checkpoint of which the rows in flight are lost instead of replayed, should
    the job be restored from it: the way out when they cannot be read or have nowhere to go."""
    savepoints: str | None = None
    """The directory for savepoints that name no other; None: `<storage>/<job>/savepoints`."""
    on_cancel: OnCancel | str = OnCancel.RETAIN
    """Whether a job that is cancelled by request, and started again, goes on from its last
    checkpoint or begins anew, with checkpoints deleted. A failed or killed one always goes on."""
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
        # Rows that one barrier has overtaken would lie before the other one's, and belong to both
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
        """Return the same in the protocol's terms.

        Raises:
            ConfigError: A value is out of range; names it.
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
        """Return whether a cancelled job leaves no checkpoint."""
        return choice_of(OnCancel, self.on_cancel, setting="on_cancel") is OnCancel.DELETE

    def checkpoint_storage(self) -> CheckpointStorage:
        """Return the checkpoint storage described by `storage`.

        Raises:
            ConfigError: It is None, or names no checkpoint storage.
        """
        if self.storage is None:
            raise ConfigError("Checkpointing: storage is missing: a directory or a bucket's URL")
        from onceflow.core.storage import checkpoint_storage

        return checkpoint_storage(self.storage)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of certificates of your own, under the same paths on every machine of the job.

    A slot is a client of the driver and both client and server to other slots, so `certificate`
    must be good for both uses.
    """

    certificate: str
    """Of the process that reads it, with whatever leads up to the authority."""
    key: str
    authority: str
    """Who has signed the certificates of all others."""
    server_name: str | None = None
    """What every certificate is for; None: each for the host or address at which it is dialled."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the driver can be asked about its job, and told what to do: HTTP and JSON.

    Every request must show the token, reading too: a status names hosts and paths, and its errors
    quote records. The token is drawn for each driver and left, readable by the driver's user alone,
    beside the job's checkpoints, where `onceflow` finds it; whoever may read there rules the job.
    """

    host: str = "127.0.0.1"
    """The address to listen at. Another one than loopback needs `tls`."""
    port: int = 0
    """0: a free one."""
    token_file: str | None = None
    """A file of the driver's machine that holds the token instead, of mode 0600; it is made when it
    is not there. For checkpoint storage that many may read."""
    tls: TlsFiles | None = None
    """The certificate to show. Clients need none: they have the token."""
    names: str | None = None
    """Host names under which clients ask, besides addresses, `localhost`, `host` and the machine's
    own name; separated by commas. Any other name is refused: a web site may claim this address."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"Endpoint: port={self.port} must be in 0-65535")
        if self.tls is None and not self.is_loopback:
            raise ConfigError(
                f"Endpoint: host={self.host!r} is seen by other machines, and the token would go"
                " there unencrypted: add tls=TlsFiles(…), or omit host"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether it can be reached on its own machine alone."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached on its own machine alone."""
    return host in {"localhost", "::1"} or host.startswith("127.")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where Prometheus finds a job's metrics, besides `/metrics` of the driver's endpoint.

    Metrics need the extra `onceflow[metrics]` on the driver. They hold no secret: names of jobs,
    operators and splits, and numbers.
    """

    prometheus_bind: str | None = None
    """`host:port` at which the driver shows `/metrics` to everyone, without a token; None: nowhere.
    Jobs of one process may name the same."""
    names: str | None = None
    """Host names under which clients ask there, besides addresses, `localhost`, the host of
    `prometheus_bind` and the machine's own name; separated by commas. Any other name is refused."""
    subtasks_max: int = 200
    """Up to how many subtasks have series of their own; more of them are summed up by chain."""
    splits_max: int = 200
    """Up to how many splits of a source have a lag of their own; more of them are summed up."""
    unhealthy_after_intervals: int | None = 30
    """After how many intervals of checkpoints, and one timeout, without a completed checkpoint
    `/healthz` says 503; None: never."""

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
        """Return host and port of `prometheus_bind`.

        Raises:
            ConfigError: It is no address with a port.
        """
        if self.prometheus_bind is None:
            return None
        # From the right: an IPv6 address in brackets has colons of its own.
        host, colon, port = self.prometheus_bind.rpartition(":")
        # isdecimal() alone also takes digits of other scripts.
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) <= 65_535
        if not colon or not host or not is_port:
            raise ConfigError(
                f"Metrics: prometheus_bind={self.prometheus_bind!r} is not host:port, with a port"
                " in 1-65535: write 127.0.0.1:9249, or 0.0.0.0:9249 for every address"
            )
        return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class OpenTelemetry:
    """Where a job's spans and metrics are sent; set by configuration alone.

    Needs the extra `onceflow[otel]` on the driver. Headers and certificates are as the SDK's
    variables say: OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE.
    """

    endpoint: str | None = None
    """Of a collector that takes OTLP over HTTP, such as http://collector:4318; None: nowhere."""
    metrics_interval: float | str = "30 s"
    """From one sending of all metrics to the next."""

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
    """What driver and slots do about the loggers below `onceflow`; set by configuration alone."""

    format: Literal["json", "text"] | None = None
    """How lines are written to stderr; None: by the handlers of the program, or Python's own."""
    level: LogLevel | None = None
    """From which level on; None: as the program has set it, or warning."""
    levels: str | None = None
    """Levels of single loggers: `onceflow.events=info,onceflow.runtime.lag=error`."""

    def __post_init__(self) -> None:
        self.parse_levels()

    def parse_levels(self) -> dict[str, str]:
        """Return, by the name of a logger, its level in upper case.

        Raises:
            ConfigError: An entry is no logger of onceflow with a level.
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
@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Deadlines and bounds of the runtime; the defaults suit one machine and a small cluster."""

    start_timeout_s: Seconds = declare_seconds(120.0)
    """From submitting the slots to the last of them reporting in."""
    heartbeat_interval_s: Seconds = declare_seconds(1.0)
    heartbeat_timeout_s: Seconds = declare_seconds(30.0)
    """Silence after which a slot is lost to the driver, and the driver to a slot."""
    cancel_timeout_s: Seconds = declare_seconds(10.0)
    """How long a cancelled slot may take before Spark is told to kill it."""
    stop_on_signals: bool = True
    """Whether SIGINT and SIGTERM stop the job while it is waited for; see `Job.wait`."""
    stop_timeout_s: Seconds = declare_seconds(30.0)
    """How long a stop by a signal may take before the job is cancelled: less than the sender of the
    signal waits until SIGKILL (Docker 10 s, Kubernetes 30 s, systemd 90 s), or that comes first."""
    channel_batches: int = 8
    """Credits of a channel: batches that may be under way or waiting in it."""
    poll_timeout_s: Seconds = declare_seconds(0.01)
    commit_deadline_s: Seconds = declare_seconds(120.0)
    scratch_dir: str | None = None
    """Where slots keep working files; default: a temporary directory, deleted with the slot."""
    driver_host: str | None = None
    """Address at which slots reach the driver; default: what Spark knows of it."""
    slot_host: str | None = None
    """Address at which other slots reach a slot. A reference such as `${env:SLOT_HOST}` is read in
    each slot. Default: the address of its host name, or else of its route to the driver."""
    tls: Literal["auto", "on", "off"] | TlsFiles = "auto"
    """Mutual TLS between driver and slots. On: with certificates that each attempt draws; auto: so
    unless the master is local, where all of it stays on one machine."""
    given: frozenset[str] = field(init=False, repr=False, compare=False)
    """The fields that the program has set."""

    def __post_init__(self) -> None:
        if not isinstance(self.tls, TlsFiles) and self.tls not in {"auto", "on", "off"}:
            raise ConfigError(f"tls={self.tls!r} must be 'auto', 'on', 'off' or TlsFiles(…)")
        if self.stop_timeout_s <= 0:
            raise ConfigError(f"stop_timeout_s={self.stop_timeout_s} must be over 0")
        if self.channel_batches < 1:
            raise ConfigError(f"channel_batches={self.channel_batches} must be 1 or more")
        # One late beat must not look like a lost slot.
        if self.heartbeat_timeout_s <= 2 * self.heartbeat_interval_s:
            raise ConfigError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s} must be over twice"
                f" heartbeat_interval_s={self.heartbeat_interval_s}"
            )
