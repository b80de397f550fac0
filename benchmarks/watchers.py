"""Asks a running job what Prometheus and its page ask: `python -m benchmarks.watchers DIRECTORY`.

DIRECTORY is the job's, in checkpoint storage: it has the driver's address and token. Once a second
until the process is killed, Prometheus more often than by default and the page as it does.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

_PATHS = ("metrics", "v1/overview", "v1/timeline", "v1/history")
_INTERVAL_S = 1.0


def main(directory: str) -> None:
    """Ask until killed; a job that is not there yet, or no more, is asked again."""
    while True:
        began_s = time.monotonic()
        try:
            _ask(Path(directory))
        except urllib.error.HTTPError:
            raise
        except OSError:
            pass
        time.sleep(max(0.0, began_s + _INTERVAL_S - time.monotonic()))


def _ask(directory: Path) -> None:
    url = json.loads((directory / "driver.json").read_text(encoding="utf-8"))["url"]
    token = (directory / "driver.token").read_text(encoding="ascii")
    for path in _PATHS:
        request = urllib.request.Request(f"{url}/{path}")
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()


if __name__ == "__main__":
    main(sys.argv[1])
