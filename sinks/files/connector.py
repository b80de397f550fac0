"""The connector of files. Its resource manager lists staged files that are not yet published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import LogFacts, TargetRecord
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.spi.connector import ResourceManager, ServerAccess, SinkConnector
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.sinks.files.layout import owners
from onceflow.sinks.files.publication import open_files, sink_errors
from onceflow.sinks.files.sink import FileSink


class FilesResourceManager(ResourceManager):
    """A resource manager of one directory or prefix, and of the staged files of every sink id."""

    def __init__(
        self,
        location: FileLocation,
        committer: Callable[[CommitterContext], Committer],
        target_record: Callable[[CommitterContext], TargetRecord],
    ) -> None:
        """Read nothing yet; `committer` and `target_record` are the sink's."""
        self._location, self._committer = location, committer
        self._target_record = target_record
        self._owners: Mapping[str, str] | None = None

    @property
    @override
    def name(self) -> str:
        return f"files at {self._location}"

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        return sorted(self._all_owners())

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return self._committer(context)

    @override
    def read_claimant(self, sink_id: str) -> str | None:
        return self._all_owners().get(sink_id)

    @override
    def target_record(self, context: CommitterContext) -> TargetRecord:
        return self._target_record(context)

    def _all_owners(self) -> Mapping[str, str]:
        if self._owners is None:
            with sink_errors():
                self._owners = owners(open_files(self._location))
        return self._owners


def _resource_manager(access: ServerAccess) -> ResourceManager:
    if access.password is not None:
        raise ConfigError("files have no password; give their client's options")
    sink = FileSink(access.url, storage_options=dict(access.options))
    return FilesResourceManager(sink.settings.location, sink.committer, sink.target_record)


CONNECTOR = SinkConnector(sink=FileSink, resource_manager=_resource_manager)
"""The connector that the catalog of connectors loads."""
