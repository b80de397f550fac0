"""Rows to an HTTP service, exactly once: each transaction is a document that can be created once.

`PUT <url>/<transaction>` with `If-None-Match: *` creates it, or is refused as it is there (412);
`HEAD` tells whether it is (404 if not). Object and document stores can do this, and your own
service with a unique key. Without it nobody knows what became of a request whose reply was lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import quote, urlsplit

import msgspec
import pyarrow as pa

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.secret_references import followed
from onceflow.core.spi import CommitterContext
from onceflow.sinks.staged import StagedSink


@dataclass(frozen=True)
class HttpSink(StagedSink):
    """Sends the rows of each transaction as one document, a JSON object a line.

    `token` may be `${env:NAME}` or `${file:/path}`, and is never printed.
    """

    url: str
    token: str = field(default="", repr=False)
    timeout_s: float = 30.0

    def check(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Claim the sink id for the job's decision log: the first one to create it has it."""
        name, mine = f"owner/{context.sink_id}", context.log_id.encode()
        if self._ask("PUT", name, mine)[0] == 412 and self._ask("GET", name)[1] != mine:
            raise ConfigError(f"sink id {context.sink_id} belongs to another job at {self.url}")

    def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        """Create the document; the service decides who of several is the first."""
        encode = msgspec.json.Encoder().encode_lines
        body = b"".join(encode(batch.to_pylist()) for batch in rows)
        return self._ask("PUT", str(transaction), body)[0] != 412

    def is_applied(self, transaction: TransactionId) -> bool:
        """Ask whether the document is there."""
        return self._ask("HEAD", str(transaction))[0] != 404

    def _ask(self, method: str, name: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return status and body of a 2xx, 404 or 412; nothing else says what is the case."""
        headers = {"If-None-Match": "*"} if method == "PUT" else {}
        if self.token:
            headers["Authorization"] = f"Bearer {followed(self.token, setting='token')}"
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        try:
            with closing(kind(parts.netloc, timeout=self.timeout_s)) as connection:
                path = f"{parts.path}/{quote(name, safe='')}"
                connection.request(method, path, body, headers)
                reply = connection.getresponse()
                content = reply.read()
        except (OSError, HTTPException) as error:
            raise SinkError(f"{method} {name} at {self.url}: {error}") from None
        if reply.status in (200, 201, 204, 404, 412):
            return reply.status, content
        raise SinkError(f"{method} {name} at {self.url}: {reply.status} {reply.reason}")
