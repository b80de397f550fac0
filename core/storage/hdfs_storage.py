"""Checkpoint storage in HDFS."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from onceflow.core.argument_types import check_fields
from onceflow.core.setting_values import seconds_of
from onceflow.core.storage import storage
from onceflow.core.storage.filesystems import bucket_settings
from onceflow.core.storage.filesystems.filesystem import CreatesAtomically
from onceflow.core.storage.filesystems.hdfs import HdfsFiles
from onceflow.core.storage.filesystems.webhdfs import HdfsSettings, is_hdfs
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory


@check_fields
@dataclass(frozen=True, slots=True)
class HdfsStorage(storage.CheckpointStorage):
    """Checkpoint storage in a directory of an HDFS, reached by WebHDFS.

    Raises:
        ConfigError: `url` is something else, a number is out of range, or `token` is a secret.
    """

    url: str
    """`webhdfs://namenode:9870/path`, `swebhdfs://` for TLS; several NameNodes with commas."""
    user: str = ""
    """The user of requests, where HDFS asks for no proof. Default: HADOOP_USER_NAME."""
    token: str = ""
    """A delegation token, by reference: `${env:NAME}`, `${file:/path}`."""
    authority: str = ""
    """A file with the certificates that `swebhdfs` trusts. Default: the system's certificates."""
    inline_threshold_bytes: int = storage.INLINE_THRESHOLD_BYTES
    """State smaller than this is kept in the decision log's record, and not in a file."""
    request_timeout: float | str = bucket_settings.REQUEST_TIMEOUT_S
    """The timeout of one request."""
    retry_timeout: float | str = bucket_settings.RETRY_TIMEOUT_S
    """The time for which a request is repeated while no NameNode serves it."""

    def __post_init__(self) -> None:
        storage.check_inline_threshold(self.inline_threshold_bytes)
        self._settings(self.url)

    @override
    def open(self, job: str) -> storage.JobStorage:
        return storage.JobStorage(self.files(), job, self.inline_threshold_bytes)

    def files(self) -> CreatesAtomically:
        """Return the files below the directory. Opens no connection yet."""
        return HdfsFiles(self._settings(self.url))

    @override
    def open_savepoint(self, location: str) -> SavepointDirectory:
        if not is_hdfs(location):
            return storage.CheckpointStorage.open_savepoint(self, location)
        return SavepointDirectory(HdfsFiles(self._settings(location)))

    @override
    def __str__(self) -> str:
        return self.url

    def _settings(self, url: str) -> HdfsSettings:
        patience = bucket_settings.Patience(
            seconds_of(self.request_timeout, setting="request_timeout"),
            seconds_of(self.retry_timeout, setting="retry_timeout"),
        )
        return HdfsSettings(url.rstrip("/"), self.user, self.token, self.authority, patience)
