"""The location of files, given by the user as a path or a url, and the file system for it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from onceflow.core.errors import ConfigError
from onceflow.core.storage.filesystems.bucket import BucketFiles
from onceflow.core.storage.filesystems.bucket_settings import BucketSettings, is_bucket
from onceflow.core.storage.filesystems.filesystem import StreamedFiles
from onceflow.core.storage.filesystems.hdfs import HdfsFiles
from onceflow.core.storage.filesystems.local import Advice, LocalFileSystem
from onceflow.core.storage.filesystems.webhdfs import HdfsSettings, is_hdfs

Publish = Literal["auto", "rename", "copy"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_PASSWORD = re.compile(r"^[^/@]*:[^/]*@")

# Protocols without rename, where a file appears with all its bytes or not at all. Those of
# `bucket_settings` count, too.
_OBJECT_STORES = frozenset({"adl", "oss", "oci", "r2", "tos", "memory"})
# Protocols whose rename is atomic.
_DIRECTORIES = frozenset({"hdfs", "arrow_hdfs", "webhdfs", "swebhdfs", "sftp", "ssh", "smb"})


@dataclass(frozen=True, slots=True, repr=False)
class FileLocation:
    """A directory or bucket. Its pickle includes the storage options, its text does not."""

    protocol: str
    root: str
    """The root in the protocol's notation; absolute if local."""
    publish: Publish = "auto"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def parse(cls, url: str, *, publish: Publish, options: Mapping[str, Any]) -> FileLocation:
        """Return the location at `url`: a path, `file://…`, or a url of a protocol of fsspec.

        Hadoop and Spark write `file:/path` for a local path.

        Raises:
            ConfigError: `url` is none of these, or it is unknown how its protocol shows files.
        """
        if publish not in ("auto", "rename", "copy"):
            raise ConfigError(f"publish={publish!r}: choose one of auto, rename, copy")
        one_slash = _ONE_SLASH.match(url)
        if one_slash is not None and one_slash[1] not in ("file", "local"):
            # A path of this form would name a directory below the working directory of the process.
            raise ConfigError(f"url {url!r}: a url has two slashes, as in {one_slash[1]}://…")
        url = url if one_slash is None else f"file:///{url[one_slash.end() :]}"
        match = _URL.fullmatch(url)
        if match is None or match[1] in ("file", "local"):
            if publish == "copy":
                raise ConfigError(
                    f"url {url!r}: publish='copy' is for object stores; in a local directory files"
                    " are renamed"
                )
            return cls("file", _local_root(url if match is None else match[2], url), "rename")
        protocol, root = match[1].lower(), match[2].rstrip("/")
        if not root.strip("/"):
            raise ConfigError(
                f"url {_hide_password(protocol, root)!r} names no bucket or directory"
            )
        bucket = is_bucket(url)
        if publish == "auto" and not bucket and protocol not in _OBJECT_STORES | _DIRECTORIES:
            raise ConfigError(
                f"url {_hide_password(protocol, root)!r}: onceflow does not know how"
                f" {protocol}:// makes a file visible. Pass publish='rename' if it renames a file"
                " in one step, or publish='copy' if a written or copied file appears complete or"
                " not at all"
            )
        if publish == "auto":
            publish = "copy" if bucket or protocol in _OBJECT_STORES else "rename"
        return cls(protocol, root, publish, dict(options))

    @property
    def url(self) -> str:
        """The whole url, including a password if there is one; for a local directory, its path."""
        return self.root if self.protocol == "file" else f"{self.protocol}://{self.root}"

    @property
    def identity(self) -> str:
        """The real path of a local directory, without links and `..`; otherwise the url."""
        return os.path.realpath(self.root) if self.protocol == "file" else str(self)

    def __repr__(self) -> str:
        return f"FileLocation({self})"

    def __str__(self) -> str:
        return self.root if self.protocol == "file" else _hide_password(self.protocol, self.root)

    def open(self, advice: Advice) -> StreamedFiles:
        """Return the file system, which connects at the first use."""
        if self.protocol == "file":
            return LocalFileSystem(self.root, advice=advice)
        if is_hdfs(self.url) and self.publish == "rename":
            return HdfsFiles(HdfsSettings.of(self.url, self.options))
        if is_bucket(self.url) and self.publish == "copy":
            return BucketFiles(BucketSettings.of(self.url, self.options))
        # Imported here, because only these file systems need fsspec and its imports.
        from onceflow.core.storage.filesystems.fsspec import ObjectStore, RemoteDirectory

        kind = RemoteDirectory if self.publish == "rename" else ObjectStore
        return kind(self.url, str(self), self.options)


def _local_root(path: str, url: str) -> str:
    if not path:
        raise ConfigError(f"url {url!r} names no directory; write file:///path/of/it")
    if url != path:
        host, slash, below = path.partition("/")
        if host not in ("", "localhost"):
            raise ConfigError(f"url {url!r} names the host {host!r}: write file:///{path}")
        path = slash + below
    # Absolute, because the driver and the executors may have different working directories.
    return str(Path(unquote(path) if url != path else path).expanduser().absolute())


def _hide_password(protocol: str, root: str) -> str:
    """Return the url without its password; `container@account` is not a password."""
    return f"{protocol}://{_PASSWORD.sub('', root)}"
