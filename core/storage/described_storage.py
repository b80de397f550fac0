"""Checkpoint storage as users describe it, by a path or url; and its kinds in HDFS and buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from typing_extensions import override

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.setting_values import seconds_of
from onceflow.core.storage import storage
from onceflow.core.storage.filesystems import bucket_settings
from onceflow.core.storage.filesystems.bucket import BucketFiles
from onceflow.core.storage.filesystems.bucket_settings import is_bucket
from onceflow.core.storage.filesystems.filesystem import CreatesAtomically
from onceflow.core.storage.filesystems.hdfs import HdfsFiles
from onceflow.core.storage.filesystems.webhdfs import HdfsSettings, is_hdfs
from onceflow.core.storage.memory_storage import MemoryStorage
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory
from onceflow.core.storage.storage import CheckpointStorage, FileSystemStorage


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


@check_fields
@dataclass(frozen=True, slots=True)
class ObjectStorage(storage.CheckpointStorage):
    """Checkpoint storage below a prefix of a bucket: `s3://`, `gs://`, `az://` or `abfs(s)://`.

    The driver and each slot take credentials from the environment or the machine's role, or from
    `options` by reference (`${env:NAME}`, `${file:/path}`). Spark writes this description to disks,
    so a secret itself is refused.

    Raises:
        ConfigError: `url` is something else, a number is out of range, or an option holds a secret.
    """

    url: str
    endpoint: str | None = None
    """The endpoint of a store other than the provider's own: `http://minio:9000`."""
    options: Mapping[str, str] | None = field(default=None, repr=False)
    """Options of obstore's configuration: `region`, `access_key_id`, `secret_access_key`, …"""
    inline_threshold_bytes: int = storage.INLINE_THRESHOLD_BYTES
    """State smaller than this is kept in the decision log's record, and not in an object."""
    part_bytes: int = bucket_settings.PART_BYTES
    """An object larger than this is written and read in parts of this size, several at once."""
    parts_at_once: int = bucket_settings.PARTS_AT_ONCE
    request_timeout: float | str = bucket_settings.REQUEST_TIMEOUT_S
    """The timeout of one request."""
    retry_timeout: float | str = bucket_settings.RETRY_TIMEOUT_S
    """The time for which a request is repeated after a failure that may pass: throttling, a broken
    connection, a store that restarts."""

    def __post_init__(self) -> None:
        storage.check_inline_threshold(self.inline_threshold_bytes)
        if plain := self._settings().plain_secrets():
            raise ConfigError(
                f"{self.url}: option {', '.join(map(repr, plain))} holds a secret, which Spark"
                " would write to disks. Give a reference instead, ${env:NAME} or ${file:/path},"
                " or omit the option and set the provider's own environment variables"
            )

    @override
    def open(self, job: str) -> storage.JobStorage:
        return storage.JobStorage(self.files(), job, self.inline_threshold_bytes)

    def files(self) -> CreatesAtomically:
        """Return the objects below the prefix as files. Opens no connection yet."""
        return BucketFiles(self._settings())

    @override
    def open_savepoint(self, location: str) -> SavepointDirectory:
        # A savepoint may be in a directory though the job is in a bucket: this is how a job moves.
        if "://" not in location or location.startswith("file:"):
            return storage.CheckpointStorage.open_savepoint(self, location)
        return SavepointDirectory(BucketFiles(replace(self, url=location)._settings()))

    @override
    def __str__(self) -> str:
        return self.url

    def _settings(self) -> bucket_settings.BucketSettings:
        options = {**(self.options or {}), **({"endpoint": self.endpoint} if self.endpoint else {})}
        return bucket_settings.BucketSettings(
            self.url.rstrip("/"),
            options,
            self.part_bytes,
            self.parts_at_once,
            bucket_settings.Patience(
                seconds_of(self.request_timeout, setting="request_timeout"),
                seconds_of(self.retry_timeout, setting="retry_timeout"),
            ),
        )


def checkpoint_storage(description: str | CheckpointStorage) -> CheckpointStorage:
    """Return the storage that `description` names: a path, `file:///path`, `s3://bucket/prefix`, ….

    Raises:
        ConfigError: The description names no checkpoint storage.
    """
    if isinstance(description, CheckpointStorage):
        return description
    if description == "memory://":
        return MemoryStorage()
    if is_hdfs(description):
        return HdfsStorage(description)
    return ObjectStorage(description) if is_bucket(description) else FileSystemStorage(description)


def savepoint_directory(storage: CheckpointStorage, location: str) -> SavepointDirectory:
    """Return the savepoint at `location`, which may be in another kind of storage than `storage`.

    Raises:
        ConfigError: `location` cannot be reached.
    """
    # If both are of one kind, `storage` opens the savepoint: it has the endpoint and the
    # credentials, which the url lacks.
    if is_bucket(location) and not isinstance(storage, ObjectStorage):
        return ObjectStorage(location).open_savepoint(location)
    if is_hdfs(location) and not isinstance(storage, HdfsStorage):
        return HdfsStorage(location).open_savepoint(location)
    return storage.open_savepoint(location)


def may_slots_write(storage: CheckpointStorage, location: str) -> bool:
    """Return True if slots may try to write to the savepoint at `location`.

    A directory: they find out at once whether they see the driver's. A bucket or HDFS: only if it
    is of the kind of `storage`, so that slots have the credentials. Otherwise each slot could wait
    until `retry_timeout` for a store that it does not reach.
    """
    if isinstance(storage, MemoryStorage):
        return False
    if is_bucket(location):
        return isinstance(storage, ObjectStorage)
    return isinstance(storage, HdfsStorage) or not is_hdfs(location)
