"""A subject of the schema registry. The driver or a writer asks about it; errors name it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from onceflow.clients.kafka.registry import (
    KeptSchema,
    RegistryDown,
    RegistryRefusal,
    SchemaKind,
    SchemaRegistry,
    deadline,
)
from onceflow.clients.kafka.settings import TopicSettings
from onceflow.core.errors import ConfigError, OnceflowError, SettingsRefused


@dataclass(frozen=True, slots=True)
class SubjectAdvice:
    """The advice in errors if the registry refuses."""

    unknown: str
    """The advice if the registry has no such subject or schema."""
    incompatible: str = ""
    """The advice if a schema is not compatible with the subject's versions."""
    unusable: str = ""
    """The advice if no rows can be made from its schema."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject and its registry. All calls raise the errors of `open_subject`."""

    registry: SchemaRegistry
    name: str
    kind: SchemaKind
    deadline_s: float

    def read_latest(self) -> KeptSchema:
        """Return the latest version.

        Raises:
            ConfigError: The latest version is in another schema language.
        """
        latest = self.registry.latest(self.name, until=deadline(self.deadline_s))
        if latest.kind is not self.kind:
            raise ConfigError(
                f"its latest version is {latest.kind.value}, but {self.kind.value} is required"
            )
        return latest

    def find_latest(self) -> KeptSchema | None:
        """Return the latest version; None if there is no subject. Raises as `read_latest`."""
        try:
            return self.read_latest()
        except RegistryRefusal as error:
            if not error.unknown:
                raise
            return None

    def register(self, text: str) -> int:
        """Return the id of the schema `text`. Register it if it is not registered yet."""
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
    """Open the subject `name` for questions. Errors inside the context name it.

    Raises:
        ConfigError: The registry refuses the user or a schema, has no such subject, or has an
            unusable schema.
        OnceflowError: The registry did not answer within the deadline. The type is `unavailable`.
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
            f"{settings.where}: {error}. The registry did not answer within"
            f" {settings.deadline_s:g} s; start it, or correct schema_registry="
        ) from None
    except ConfigError as error:
        text = f"; {advice.unusable}" if advice.unusable else ""
        raise ConfigError(f"{settings.where}: subject {name!r}: {error}{text}") from None
    finally:
        registry.close()
