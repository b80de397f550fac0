"""The configuration: settings from a file and the environment, and the objects built from them.

Settings have onceflow's or Flink's names. Precedence: the command line (`onceflow run --set`) > the
program > the file > the environment > the default. Each source may set an option once, under one of
its names. Values are checked when they are read, so an error stops the program before the job runs.
The error names the most similar known name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, cast

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.restart import (
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
)
from onceflow.core.settings.configuration_file import WrittenSetting, is_flink_file, read_settings
from onceflow.core.settings.known_settings import OPTIONS, RESTART, Kind, Option, Value
from onceflow.core.settings.pipeline_settings import (
    Checkpointing,
    Endpoint,
    Logging,
    Metrics,
    OpenTelemetry,
    RuntimeSettings,
    TlsFiles,
)
from onceflow.core.state import HeapBackend, RocksDBBackend, StateBackend
from onceflow.core.storage import (
    CheckpointStorage,
    FileSystemStorage,
    ObjectStorage,
    checkpoint_storage,
)

_log = logging.getLogger("onceflow.config")
_Settings = TypeVar("_Settings", Checkpointing, RuntimeSettings)

FILE_VARIABLE = "ONCEFLOW_CONFIG"
_PREFIX = "ONCEFLOW_"
_BY_NAME: Mapping[str, Option] = {
    name: option for option in OPTIONS for name in (option.name, *option.flink)
}
_NEAR = 0.85
"""The similarity from which an unknown variable counts as a misspelled setting."""


def variable_of(name: str) -> str:
    """Return the environment variable of the setting `name`."""
    return _PREFIX + name.upper().replace(".", "_").replace("-", "_")


_BY_VARIABLE: Mapping[str, str] = {
    # If two names map to one variable, it stands for onceflow's own name.
    **{variable_of(name): name for name in _BY_NAME},
    **{variable_of(option.name): option.name for option in OPTIONS},
}
_SECTIONS = tuple(
    variable_of(f"{known_option.name.partition('.')[0]}.") for known_option in OPTIONS
)
_OWN_SECTIONS = (
    "checkpointing.",
    "endpoint.",
    "logging.",
    "metrics.prometheus.",
    "otel.",
    "restore.",
    "runtime.",
    "state_backend.",
    "storage.",
)
"""The sections that only onceflow has. In a Flink file, an unknown name in them is an error."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The effective value of an option, with its origin."""

    option: Option
    value: Value
    origin: str = "default"
    """The file or variable that sets the value, and the name that it uses if it is Flink's."""
    hint: str | None = None
    is_forced: bool = False
    """True if the setting overrides the program."""

    @property
    def is_set(self) -> bool:
        """True if the value is not the default."""
        return self.origin != "default"

    def __str__(self) -> str:
        return f"{self.option.name}={self.option.to_text(self.value)} ({self.origin})"


@dataclass(slots=True)
class _CommandLine:
    """The settings of this process's command line, for every pipeline that it builds."""

    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])


_COMMAND_LINE = _CommandLine()


def parse_assignments(texts: Sequence[str]) -> Mapping[str, Setting]:
    """Parse `texts`, each `name=value`, into settings for `force_settings`.

    Raises:
        ConfigError: A text is not an assignment, its name is unknown (the message has a similar
            name), its value is invalid, or an option is set twice.
    """
    return {
        name: replace(setting, is_forced=True)
        for name, setting in _layer(map(_split_assignment, texts)).items()
    }


def _split_assignment(text: str) -> tuple[str, str, object]:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigError(
            f"--set {text!r} is not name=value, as in --set checkpointing.interval=5s"
        )
    return name.strip(), "--set", value.strip()


@contextmanager
def force_settings(settings: Mapping[str, Setting]) -> Generator[None]:
    """Make `settings` override the program for pipelines that are built inside the block."""
    before, _COMMAND_LINE.settings = _COMMAND_LINE.settings, settings
    try:
        yield
    finally:
        _COMMAND_LINE.settings = before


class Configuration:
    """The settings of pipelines, one for each option. Immutable. Load it on the driver.

    `Pipeline` loads it from the environment and from the file that `config` or ONCEFLOW_CONFIG
    names. Arguments of `Pipeline` override it: single fields for `Checkpointing` and
    `RuntimeSettings`, whole objects for all other arguments.
    """

    def __init__(
        self, settings: Mapping[str, Setting], left: Mapping[str, str] | None = None
    ) -> None:
        self._settings = settings
        self._left = left or {}

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        written: Sequence[WrittenSetting] = (),
    ) -> Configuration:
        """Load the environment and `file` (default: the file that ONCEFLOW_CONFIG names).

        A file is TOML. A file that ends in `.yaml` or `.yml` is a Flink file. Flink settings that
        onceflow does not have are ignored, and `hints()` lists them. `written` are settings from
        another place, such as a connector file. They override those of `file`.

        Raises:
            ConfigError: The file cannot be read, a name is unknown (the message has a similar
                name), a value is invalid, or one source sets an option twice.
        """
        environment = os.environ if environment is None else environment
        file = file or environment.get(FILE_VARIABLE) or None
        layer = _layer(_from_environment(environment))
        left: Mapping[str, str] = {}
        if file is not None:
            settings, left = _from_file(Path(file))
            layer |= settings
        # Later layers override earlier ones. The environment above is the weakest.
        layer |= _layer((setting.name, setting.location, setting.value) for setting in written)
        layer |= _COMMAND_LINE.settings
        configuration = cls(
            {
                known_option.name: layer.get(
                    known_option.name, Setting(known_option, known_option.default)
                )
                for known_option in OPTIONS
            },
            left,
        )
        for hint in configuration.hints():
            _log.warning("%s", hint)
        return configuration

    def settings(self) -> tuple[Setting, ...]:
        """Return the effective setting of every option, in the order of the table."""
        return tuple(self._settings.values())

    def hints(self) -> tuple[str, ...]:
        """Return hints on settings that are valid but unused, or that differ from Flink's."""
        hints = [
            f"{setting}: {setting.hint}" for setting in self._settings.values() if setting.hint
        ]
        # Settings of strategies that are not in use have no effect, so hint at them.
        used = {f"restart.{self._value('restart.strategy')}", "restart.strategy"}
        for setting in self._settings.values():
            section = setting.option.name.rpartition(".")[0]
            unused = section.startswith("restart") and not {section, setting.option.name} & used
            if section == "state_backend" and setting.option.name != "state_backend.type":
                unused = self._value("state_backend.type") != "rocksdb"
            if setting.is_set and unused:
                hints.append(f"{setting} is not used: {self._find_choice(section)}")
        if self._left:
            names = ", ".join(
                _describe_left_out(name, location) for name, location in self._left.items()
            )
            hints.append(f"settings of Flink that have no meaning here were left out: {names}")
        return tuple(hints)

    def check(self) -> None:
        """Raise ConfigError if the configured settings contradict each other."""
        self._merge("checkpointing", Checkpointing())
        self.runtime_settings(None)
        self.state_backend(None)
        self.restart(None)
        self.endpoint()
        self.metrics(None)
        self.logging()
        self.telemetry()

    # --- objects built from settings --------------------------------------------------------------

    def checkpointing(self, given: Checkpointing | None) -> Checkpointing:
        """Return `given`, with the fields that it does not set from the configuration.

        Raises:
            ConfigError: The combined values are invalid, or no storage is set.
        """
        merged = self._merge("checkpointing", given or Checkpointing())
        if merged.storage is None:
            raise ConfigError(
                "the storage of checkpoints is not set. Set it by Checkpointing(storage=…), or"
                " checkpointing.storage in a configuration file, or"
                f" {variable_of('checkpointing.storage')}"
            )
        return replace(merged, storage=self._storage(merged.storage))

    def runtime_settings(self, given: RuntimeSettings | None) -> RuntimeSettings:
        """Return `given`, with the fields that it does not set from the configuration.

        Raises:
            ConfigError: The combined values are invalid.
        """
        return self._merge("runtime", given or RuntimeSettings())

    def parallelism(self, given: int | None) -> int:
        """Return `given`, or the configured number of slots."""
        value = self._value_unless(given, "pipeline.parallelism")
        return cast("int", value)

    def max_parallelism(self, given: int | None) -> int | None:
        """Return `given`, or the configured number of key groups."""
        return cast("int | None", self._value_unless(given, "pipeline.max_parallelism"))

    def allow_non_restored_state(self, given: bool | None) -> bool:
        """Return `given`, or the configured value."""
        return cast("bool", self._value_unless(given, "pipeline.allow_non_restored_state"))

    def savepoint(self) -> str | None:
        """Return the default savepoint to start from, or None."""
        return cast("str | None", self._value("restore.savepoint"))

    def claims(self) -> bool:
        """Return True if the job claims that savepoint, and so may delete it."""
        return self._value("restore.claim_mode") == "claim"

    def state_backend(self, given: StateBackend | str | None) -> StateBackend:
        """Return `given`, which may be a name, or the configured backend.

        Raises:
            ConfigError: There is no backend of this name, or a value is out of range.
        """
        if self._replaces(given, "state_backend", "type"):
            given = None
        if isinstance(given, StateBackend):
            return given
        option = _BY_NAME["state_backend.type"]
        name = self._value(option.name)
        if given is not None:
            name = option.parse(given, "state_backend")
            if hint := option.hint(given):
                _log.warning("state_backend=%r: %s", given, hint)
        try:
            match name:
                case "heap":
                    return HeapBackend()
                case "rocksdb":
                    return RocksDBBackend(**self._fields("state_backend."))
                case _:
                    return _load_backend(str(name))
        except ConfigError as error:
            where = self._describe_set("state_backend.") or "by the program"
            raise ConfigError(f"{error}: {where}") from None

    def restart(self, given: RestartStrategy | None) -> RestartStrategy:
        """Return `given`, or the configured strategy.

        Raises:
            ConfigError: A value is out of range.
        """
        if given is not None and not self._replaces(given, "restart", "strategy"):
            return given
        name = str(self._value("restart.strategy"))
        values = self._fields(f"restart.{name}.")
        try:
            match name:
                case "none":
                    return NoRestart()
                case "fixed_delay":
                    return FixedDelay(**values)
                case "failure_rate":
                    return FailureRate(**values)
                case _:
                    return replace(RESTART, **values)
        except ValueError as error:
            raise ConfigError(f"{error}: {self._describe_set(f'restart.{name}.')}") from None

    def resolve_endpoint(self, given: Endpoint | None) -> Endpoint | None:
        """Return the endpoint of the command line if it sets one, else `given`.

        Raises:
            ConfigError: As in `endpoint`.
        """
        return self.endpoint() if self.is_forced("endpoint") else given

    def endpoint(self) -> Endpoint:
        """Return the configured endpoint of the driver.

        Raises:
            ConfigError: Only a part of certificate, key and authority is set, or a value is
                invalid.
        """
        values = self._fields("endpoint.")
        tls = [values.pop(name, None) for name in ("certificate", "key", "authority")]
        # With only one or two of the three, the endpoint would run without TLS or fail to start,
        # although the user expects encryption.
        if any(tls) and not all(tls):
            raise ConfigError(
                "set all three of endpoint.certificate, endpoint.key and endpoint.authority, or"
                f" none; set now: {self._describe_set('endpoint.')}"
            )
        try:
            return Endpoint(tls=TlsFiles(*tls) if all(tls) else None, **values)
        except ConfigError as error:
            raise ConfigError(f"{error}: {self._describe_set('endpoint.')}") from None

    def metrics(self, given: Metrics | None) -> Metrics:
        """Return `given`, or the configured metrics. The command line overrides both.

        Raises:
            ConfigError: A value is invalid.
        """
        if given is not None and not self.is_forced("metrics"):
            return given
        try:
            return Metrics(**self._fields("metrics."))
        except ConfigError as error:
            raise ConfigError(f"{error}: {self._describe_set('metrics.')}") from None

    def logging(self) -> Logging:
        """Return the logging settings of driver and slots.

        Raises:
            ConfigError: A level is invalid, or a logger is not below `onceflow`.
        """
        values = self._fields("logging.")
        try:
            return Logging(
                **{name: value for name, value in values.items() if value != "unchanged"}
            )
        except ConfigError as error:
            raise ConfigError(f"{error}: {self._describe_set('logging.')}") from None

    def telemetry(self) -> OpenTelemetry:
        """Return the settings for sending spans and metrics.

        Raises:
            ConfigError: A value is invalid.
        """
        try:
            return OpenTelemetry(**self._fields("otel."))
        except ConfigError as error:
            raise ConfigError(f"{error}: {self._describe_set('otel.')}") from None

    # --- steps ------------------------------------------------------------------------------------

    def _value(self, name: str) -> Value:
        return self._settings[name].value

    def _value_unless(self, given: Value, name: str) -> Value:
        """Return `given`, or the configured value if it is None or the command line sets it."""
        setting = self._settings[name]
        return setting.value if given is None or setting.is_forced else given

    def is_forced(self, section: str) -> bool:
        """Return True if the command line has set option `section` or an option in this section."""
        return any(
            setting.is_forced and (name == section or name.startswith(f"{section}."))
            for name, setting in self._settings.items()
        )

    def _replaces(self, given: object, section: str, selector: str) -> bool:
        """Return True if the command line replaces `given`, which can only be replaced as a whole.

        Raises:
            ConfigError: The command line sets a part of the section, but not `selector`.
        """
        if given is None or isinstance(given, str):
            return self.is_forced(f"{section}.{selector}")
        # The program's object may be of any class, so a single field cannot be set in it. Refuse
        # instead of ignoring the field.
        if self.is_forced(section) and not self.is_forced(f"{section}.{selector}"):
            forced = ", ".join(
                setting.option.name
                for setting in self._settings.values()
                if setting.is_forced and setting.option.name.startswith(f"{section}.")
            )
            raise ConfigError(
                f"--set {forced}: the program passes {section}={given}, which is taken whole;"
                f" set {section}.{selector} as well"
            )
        return self.is_forced(section)

    def _find_choice(self, section: str) -> str:
        chosen = "state_backend.type" if section == "state_backend" else "restart.strategy"
        return str(self._settings[chosen])

    def _fields(self, prefix: str) -> dict[str, Any]:
        """Return the values set below `prefix`, keyed by the field of the class that they set."""
        return {setting.option.target: setting.value for setting in self._list_set(prefix)}

    def _list_set(self, prefix: str) -> list[Setting]:
        return [
            setting
            for setting in self._settings.values()
            if setting.is_set and setting.option.target and setting.option.name.startswith(prefix)
        ]

    def _describe_set(self, prefix: str) -> str:
        texts = [
            str(setting) for name, setting in self._settings.items() if name.startswith(prefix)
        ]
        return ", ".join(text for text in texts if not text.endswith("(default)"))

    def _merge(self, section: str, given: _Settings) -> _Settings:
        values: dict[str, Any] = {
            setting.option.target: setting.value
            for setting in self._list_set(f"{section}.")
            if setting.is_forced or setting.option.target not in given.given
        }
        if not values:
            return given
        try:
            return replace(given, **values)
        except ConfigError as error:
            raise ConfigError(f"{error}: {self._describe_set(f'{section}.')}") from None

    def _storage(self, described: str | CheckpointStorage) -> CheckpointStorage:
        """Return the storage. For a URL or path, apply the settings of section `storage.`."""
        if isinstance(described, CheckpointStorage):
            return described
        storage = checkpoint_storage(described)
        threshold = self._settings["storage.inline_threshold"]
        if threshold.is_set and isinstance(storage, (FileSystemStorage, ObjectStorage)):
            storage = replace(storage, inline_threshold_bytes=cast("int", threshold.value))
        endpoint = self._settings["storage.endpoint"]
        if endpoint.is_set and isinstance(storage, ObjectStorage):
            storage = replace(storage, endpoint=cast("str", endpoint.value))
        return storage


def _load_backend(name: str) -> StateBackend:
    group = "onceflow.state_backends"
    points = [point for point in entry_points(group=group) if point.name == name]
    # If two packages use the same name, take neither: their order depends on the order of
    # installation.
    if len(points) != 1:
        known = sorted({point.name for point in entry_points(group=group)} | {"heap", "rocksdb"})
        near = get_close_matches(name.lower(), known, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"state_backend.type={name!r}: {meant}there are {', '.join(known)};"
            f" packages bring theirs by entry points of group {group}"
        )
    backend: object = points[0].load()()
    if not isinstance(backend, StateBackend):
        raise ConfigError(
            f"state_backend.type={name!r} is {points[0].value}, which does not describe a state"
            " backend"
        )
    return backend


# --- layers --------------------------------------------------------------------------------------


def _layer(settings: Iterator[tuple[str, str, object]]) -> dict[str, Setting]:
    """Return the settings of one source, given as (name, origin, written value)."""
    layer: dict[str, Setting] = {}
    names: dict[str, str] = {}
    for name, origin, written in settings:
        option = _BY_NAME.get(name)
        if option is None:
            raise ConfigError(f"{origin}: {_unknown(name)}")
        if option.name in layer:
            raise ConfigError(
                f"{origin}: {names[option.name]} and {name} are one setting; set it once"
            )
        try:
            value = option.parse(written, name)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None
        # The name of an environment variable already shows the name that was used.
        alias = "" if name == option.name or origin.endswith(name) else f", as {name}"
        layer[option.name] = Setting(option, value, origin + alias, option.hint(written))
        names[option.name] = name
    return layer


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, object]]:
    for variable in sorted(environment):
        if variable in _BY_VARIABLE:
            yield _BY_VARIABLE[variable], f"environment {variable}", environment[variable]
        elif variable.startswith(_PREFIX) and variable != FILE_VARIABLE:
            # A program may have its own variables that start with ONCEFLOW_. Only a variable that
            # resembles a setting, or belongs to one of our sections, is reported as an error.
            near = get_close_matches(variable, _BY_VARIABLE, n=1, cutoff=_NEAR)
            if near or variable.startswith(_SECTIONS):
                meant = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(
                    f"environment variable {variable} is not a setting: {meant}correct or unset it"
                )


def _from_file(path: Path) -> tuple[dict[str, Setting], dict[str, str]]:
    """Read `path`. Return the settings, and the ignored names of a Flink file with locations."""
    written = read_settings(path)
    if not is_flink_file(path):
        return _layer((setting.name, setting.location, setting.value) for setting in written), {}
    # A Flink file has many names without meaning here, which are ignored. Flink has no names in our
    # own sections, so an unknown name there is an error.
    known = [
        setting
        for setting in written
        if setting.name in _BY_NAME or setting.name.startswith(_OWN_SECTIONS)
    ]
    settings = _layer(
        (setting.name, setting.location, _in_milliseconds(setting)) for setting in known
    )
    left = {setting.name: setting.location for setting in written if setting not in known}
    return settings, left


def _in_milliseconds(written: WrittenSetting) -> object:
    """Return the value. In a Flink file, a duration without a unit is in milliseconds."""
    option = _BY_NAME.get(written.name)
    if option is None or option.name == written.name or option.kind is not Kind.DURATION:
        return written.value
    # This applies only to Flink files, where 5000 means milliseconds. In other places a plain
    # number under a Flink name is refused.
    is_plain_number = str(written.value).strip().isdecimal()
    return f"{written.value} ms" if is_plain_number else written.value


def _unknown(name: str) -> str:
    near = get_close_matches(name, _BY_NAME, n=1)
    meant = f"did you mean {near[0]!r}?" if near else "`onceflow config` prints all there are"
    return f"{name!r} is not a setting; {meant}"


def _describe_left_out(name: str, location: str) -> str:
    near = get_close_matches(name, _BY_NAME, n=1, cutoff=_NEAR)
    meant = f"; {near[0]} is known" if near else ""
    return f"{name} ({location.removeprefix('file ')}{meant})"
