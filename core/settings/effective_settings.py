"""The effective settings of a pipeline with their origins, for the CLI and the web page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from onceflow.core.errors import ConfigError
from onceflow.core.settings.configuration import Configuration, Setting
from onceflow.core.settings.known_settings import Value
from onceflow.core.settings.pipeline_settings import Checkpointing, RuntimeSettings

PROGRAM = "program"
"""The origin of arguments that the program passes to `Pipeline`."""


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """A setting as it is in effect for a pipeline."""

    name: str
    value: str
    origin: str
    """The origin: `--set`, `program`, a file with line, an environment variable, or `default`."""
    default: str


def list_effective(
    configured: Configuration,
    checkpointing: Checkpointing | None,
    runtime: RuntimeSettings | None,
    objects: Mapping[str, object],
) -> tuple[EffectiveSetting, ...]:
    """Return every setting. `objects` are the program's other arguments, by name or section.

    An object that replaces a whole section (a backend, a restart strategy, an endpoint) is listed
    under the section's name. The settings that it replaces are omitted.
    """
    shown: list[EffectiveSetting] = []
    given = {
        name: value
        for name, value in objects.items()
        if value is not None and not configured.is_forced(name)
    }
    for name, value in given.items():
        shown.append(EffectiveSetting(name, _show(value), PROGRAM, ""))
    for setting in configured.settings():
        name = setting.option.name
        # With the dot, `restart` does not hide a section that only starts with the same letters.
        if any(name == given_name or name.startswith(f"{given_name}.") for given_name in given):
            continue
        holder = {"checkpointing": checkpointing, "runtime": runtime}.get(name.partition(".")[0])
        shown.append(_find_effective(setting, holder))
    return tuple(sorted(shown, key=lambda effective: effective.name))


def _find_effective(
    setting: Setting, holder: Checkpointing | RuntimeSettings | None
) -> EffectiveSetting:
    option = setting.option
    default = option.to_text(option.default)
    if holder is not None and option.target in holder.given and not setting.is_forced:
        value: object = getattr(holder, option.target)
        return EffectiveSetting(option.name, _show_as(setting, value), PROGRAM, default)
    return EffectiveSetting(option.name, option.to_text(setting.value), setting.origin, default)


def _show_as(setting: Setting, value: object) -> str:
    plain: Value
    if value is None or isinstance(value, (str, int, float, bool)):
        plain = value
        try:
            return setting.option.to_text(plain)
        except (ConfigError, ValueError):
            return str(value)
    return _show(value)


def _show(value: object) -> str:
    """Return a description without secrets. The `str` of our objects contains none."""
    return str(value.value) if isinstance(value, Enum) else str(value)
