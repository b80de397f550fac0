"""Google's XML interface before a real S3 server: for want of a server that speaks it itself.

No emulator that can be had takes a conditional write, or an upload in parts, by the interface that
object_store uses. It is nearly S3's own: the same paths, listings and parts, with other names for
headers and another proof of who asks. That is translated here; what is stored, what a condition
decides and what a kill leaves is the server's doing.

    x-goog-if-generation-match: 0   If-None-Match: *; refused on uploads in parts, as Google does
    x-goog-copy-source              x-amz-copy-source
    Authorization: Bearer           looked at here; the server gets a signature instead

Source: Google Cloud Storage, XML API: headers, "Request preconditions", "XML API multipart
uploads".
"""

from __future__ import annotations

import hashlib
import importlib
import threading
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from tests.support.servers.s3 import EmbeddedS3
from typing_extensions import override

# botocore has no types.
_AUTH: Any = importlib.import_module("botocore.auth")
_REQUESTS: Any = importlib.import_module("botocore.awsrequest")
_CREDENTIALS: Any = importlib.import_module("botocore.credentials")

TOKEN = "the-token-of-the-tests"
_TIMEOUT_S = 30.0
_CONDITION = "x-goog-if-generation-match"
_ASKED = ("Content-Type", "Range", "If-Match", "If-None-Match")
_TOLD = ("ETag", "Last-Modified", "Content-Range", "Content-Type")


class GoogleFront:
    """Answers on a port of the loopback for as long as it is open."""

    def __init__(self, server: EmbeddedS3) -> None:
        front = self
        self.server = server

        class Handler(_Handler):
            behind = front

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(60)

    def asked(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the server's answer to its owner: status, headers and body."""
        signed = self._signed(method, target, headers, body)
        connection = HTTPConnection(urlsplit(self.server.endpoint).netloc, timeout=_TIMEOUT_S)
        try:
            connection.request(method, target, body, signed)
            reply = connection.getresponse()
            read = reply.read()
        finally:
            connection.close()
        told = {name: reply.headers[name] for name in _TOLD if name in reply.headers}
        if method == "HEAD":
            told["Content-Length"] = reply.headers.get("Content-Length", "0")
        return reply.status, told, read

    def _signed(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> dict[str, str]:
        environment = self.server.environment
        headers["X-Amz-Content-SHA256"] = hashlib.sha256(body).hexdigest()
        url = f"{self.server.endpoint}{target}"
        request = _REQUESTS.AWSRequest(method, url, headers, data=body)
        key, secret = environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
        owner = _CREDENTIALS.Credentials(key, secret)
        _AUTH.S3SigV4Auth(owner, "s3", environment["AWS_REGION"]).add_auth(request)
        return dict(request.headers.items())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behind: GoogleFront

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        query = parse_qsl(url.query, keep_blank_values=True)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "AuthenticationRequired")
            return
        headers = {name: self.headers[name] for name in _ASKED if name in self.headers}
        if _CONDITION in self.headers:
            if self.headers[_CONDITION] != "0" or "uploadId" in dict(query):
                self._refuse(400, "NotImplemented")
                return
            headers["If-None-Match"] = "*"
        if source := self.headers.get("x-goog-copy-source"):
            headers["x-amz-copy-source"] = quote(unquote(source))
        target = quote(unquote(url.path), safe="/-_.~")
        if query:
            target += f"?{urlencode(query, quote_via=quote)}"
        try:
            self._answer(*self.behind.asked(self.command, target, headers, body))
        except (OSError, HTTPException):
            # Nobody is there: Google's front ends would be gone, too.
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        said = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self._answer(status, {}, said.encode())

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815 - as its base has it
