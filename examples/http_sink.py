"""Rows to an HTTP service, exactly once: each transaction is a document that can be created once.

`PUT <url>/<transaction>` with `If-None-Match: *` creates it, or is refused as it is there (412);
`HEAD` tells whether it is (404 if not). Object and document stores can do this, and your own
service with a unique key. Without it nobody knows what became of a request whose reply was lost.
Documents are the proofs, and are kept: a request may arrive long after another one did the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import quote, urlsplit

import msgspec
import pyarrow as pa

from onceflow.connectors import (
    CommitterContext,
    ConfigError,
    Fenced,
    SinkError,
    StagedSink,
    TransactionId,
    follow_references,
)


@dataclass(frozen=True)
class HttpSink(StagedSink):
    """Sends the rows of each transaction as one document, a JSON object a line.

    `token` may be `${env:NAME}` or `${file:/path}`, and is never printed.
    """

    url: str
    token: str = field(default="", repr=False)
    timeout_s: float = 30.0

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Claim the sink id: claims are numbered documents, and the last one is who may write."""
        claims = f"owner/{context.sink_id}"

        def is_free(number: int) -> bool:
            return self._ask("HEAD", f"{claims}/{number}")[0] == 404

        top = 1
        while not is_free(top):
            top *= 2
        last = bisect_left(range(1, top), True, key=is_free)
        held = self._ask("GET", f"{claims}/{last}")[1] if last else b" 0"
        log_id, _, attempt = held.decode().rpartition(" ")
        if log_id not in ("", context.log_id):
            raise ConfigError(f"sink id {context.sink_id} belongs to another job at {self.url}")
        mine = f"{context.log_id} {context.attempt}".encode()
        if (
            int(attempt) >= context.attempt
            or self._ask("PUT", f"{claims}/{last + 1}", mine)[0] == 412
        ):
            raise Fenced(f"attempt {context.attempt} of {context.sink_id} is not newer: {held!r}")

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
            headers["Authorization"] = f"Bearer {follow_references(self.token, setting='token')}"
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
