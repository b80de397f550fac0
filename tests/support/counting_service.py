"""An HTTP service in a process of its own, which counts its calls by their idempotency key."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

_LATENCY_S = 0.005


@dataclass(frozen=True)
class CountingService:
    """The client of the service. Pickled to the slots."""

    url: str

    def call(self, record_id: int, key: str) -> int:
        """Return twice the id. Blocks until the service answers."""
        request = Request(f"{self.url}/{record_id}", headers={"Idempotency-Key": key})
        with urlopen(request, timeout=60) as response:
            return int(response.read())

    def counts(self) -> tuple[dict[str, dict[str, int]], int]:
        """Return the number of calls by record and key, and how many ran at once."""
        with urlopen(f"{self.url}/counts", timeout=60) as response:
            counts, running_max = json.loads(response.read())
        return counts, running_max


@contextmanager
def counting_service() -> Generator[CountingService]:
    """Run the service in another process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.counting_service"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield CountingService(f"http://127.0.0.1:{int(process.stdout.readline())}")
    finally:
        process.kill()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


class _Handler(BaseHTTPRequestHandler):
    counts: dict[str, dict[str, int]] = {}  # noqa: RUF012 - of the only server
    lock = threading.Lock()
    running = running_max = 0

    def do_GET(self) -> None:
        name = self.path.strip("/")
        if name == "counts":
            self._answer(json.dumps([self.counts, _Handler.running_max]))
            return
        with self.lock:
            keys = self.counts.setdefault(name, {})
            key = self.headers["Idempotency-Key"]
            keys[key] = keys.get(key, 0) + 1
            _Handler.running += 1
            _Handler.running_max = max(_Handler.running_max, _Handler.running)
        # Later records may be answered before earlier ones.
        time.sleep(_LATENCY_S * (1 + int(name) % 3))
        with self.lock:
            _Handler.running -= 1
        self._answer(str(2 * int(name)))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any, **options: Any) -> None:
        """Log nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
