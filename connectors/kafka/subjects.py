"""One subject of the schema registry, asked on the driver or by a writer; errors name it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from onceflow.connectors.kafka.registry import (
    KeptSchema,
    RegistryDown,
    RegistryRefusal,
    SchemaKind,
    SchemaRegistry,
    deadline,
)
from onceflow.connectors.kafka.settings import TopicSettings
from onceflow.core.errors import ConfigError, OnceflowError, SettingsRefused


@dataclass(frozen=True, slots=True)
class SubjectAdvice:
    """What a user does when the registry refuses."""

    unknown: str
    """It has no such subject or schema."""
    incompatible: str = ""
    """A schema may not follow the subject's versions."""
    unusable: str = ""
    """No rows can be made of its schema."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject, and a registry to ask about it. All calls raise as `open_subject` says."""

    registry: SchemaRegistry
    name: str
    kind: SchemaKind
    deadline_s: float

    def read_latest(self) -> KeptSchema:
        """Return the latest version.

        Raises:
            ConfigError: It is of another kind.
        """
        latest = self.registry.latest(self.name, until=deadline(self.deadline_s))
        if latest.kind is not self.kind:
            raise ConfigError(
                f"its latest version is {latest.kind.value}, and {self.kind.value} is asked for"
            )
        return latest

    def find_latest(self) -> KeptSchema | None:
        """Return the latest version; None: there is no such subject. Raises as `read_latest`."""
        try:
            return self.read_latest()
        except RegistryRefusal as error:
            if not error.unknown:
                raise
            return None

    def register(self, text: str) -> int:
        """Return the id of the schema `text`, registered now unless it has been before."""
        until = deadline(self.deadline_s)
        return self.registry.register(self.name, self.kind, text, until=until)


@contextmanager
def open_subject(
    settings: TopicSettings,
    name: str,
    kind: SchemaKind,
    *,
    advice: SubjectAdvice,
    unavailable: type[OnceflowError],
) -> Generator[Subject, None, None]:
    """Ask about the subject `name`; errors inside name it.

    Raises:
        ConfigError: The registry refuses us or a schema, has no such subject, or a schema there
            cannot be used.
        OnceflowError: It did not answer within the deadline; it is `unavailable`.
    """
    registry = SchemaRegistry(settings.require_registry(f"subject {name!r}"))
    try:
        yield Subject(registry, name, kind, settings.deadline_s)
    except RegistryRefusal as error:
        what_to_do = advice.incompatible if error.incompatible else advice.unknown
        text = f". {what_to_do}" if error.incompatible or error.unknown else ""
        error_class = ConfigError if error.incompatible or error.unknown else SettingsRefused
        raise error_class(f"{settings.where}: {error}{text}") from None
    except RegistryDown as error:
        raise unavailable(
            f"{settings.where}: {error}. It was asked for {settings.deadline_s:g} s; start it, or"
            " correct schema_registry="
        ) from None
    except ConfigError as error:
        text = f"; {advice.unusable}" if advice.unusable else ""
        raise ConfigError(f"{settings.where}: subject {name!r}: {error}{text}") from None
    finally:
        registry.close()
