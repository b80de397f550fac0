"""The note of the target in a directory of decisions. A database's own decisions need no note.

    <stagingLocation>/batches-<sink id>/target.json    written before the first decision

With another target under the same sink id, a batch in the first target would count as written, and
rows that are staged for the first target would go to the second.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from onceflow.connectors.spark.options.option_table import sink_options
from onceflow.core.decoding import json_decoder
from onceflow.core.errors import ConfigError
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE
from onceflow.core.storage.log.batch_log import decision_directory

_FILE = "target.json"
_DIGEST_LENGTH = 10
_SECRET = re.compile(r"pass|secret|token|credential|api.?key|private|auth", re.IGNORECASE)
_USER_INFO = re.compile(r"//[^/@]*@")


@dataclass(frozen=True, slots=True)
class NotedTarget:
    """The facts about the target of a write. Any process of the driver may use them."""

    directory: str
    sink_id: str
    facts: Mapping[str, str]
    """Facts by the names of options: equal for every write to the target, and no secrets."""

    def require(self) -> None:
        """Raise an error unless the sink id has this target; its first write notes it.

        Raises:
            ConfigError: The sink id has written to another target.
            StorageError: The directory cannot be read or written now.
        """
        location = FileLocation.parse(self.directory, publish="auto", options={})
        files = location.open(CHECKPOINT_STORAGE)
        directory = decision_directory(self.sink_id)
        path = f"{directory}/{_FILE}"
        noted = files.read(path)
        if noted is None:
            files.make_directory(directory)
            files.create_if_absent(path, msgspec.json.encode(dict(self.facts)))
            noted = files.read(path) or b"{}"
        facts = json_decoder(dict[str, str]).decode(noted)
        if facts == self.facts:
            return
        names = sorted(facts.keys() | self.facts.keys())
        other = [name for name in names if facts.get(name) != self.facts.get(name)]
        raise ConfigError(
            f"sink id {self.sink_id!r} has written with another value of {', '.join(other)}: what"
            " it has decided there must not be taken for this target. Nothing was written. Is this"
            " another target? Then give option sinkId, a name of its own for each target. Is it the"
            " same target, of which only such an option has changed? Then delete"
            f" {location}/{path}; keep everything else in that directory"
        )


def own_option_digests(options: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of each option of a sink of one's own, without those that name secrets."""
    return {
        name: hashlib.sha256(_USER_INFO.sub("//", value).encode()).hexdigest()[:_DIGEST_LENGTH]
        for name, value in sink_options(options).items()
        if not _SECRET.search(name)
    }
