"""What the job says of itself while the demo runs: its transactions, and why it starts again."""

from __future__ import annotations

from collections.abc import Callable

from onceflow.cli.demo.driver_files import DriverStatus, SinkTransactions

_LENGTH_MAX = 240


class News:
    """Tells each reason once, and the state of the transactions whenever it is looked at."""

    def __init__(self, say: Callable[[str], None], show: Callable[[str], None]) -> None:
        """Take what prints a line, and what shows a text in the place of the one before."""
        self._say = say
        self._show = show
        self._told = ""

    def look(self, status: DriverStatus | None) -> None:
        """Tell what is new in `status`."""
        if status is None:
            return
        if status.sinks:
            self._show("; ".join(described(sink) for sink in status.sinks))
        if status.last_error and status.last_error != self._told:
            self._told = status.last_error
            reason = " ".join(status.last_error.split())
            cut = reason if len(reason) <= _LENGTH_MAX else f"{reason[:_LENGTH_MAX]}…"
            self._say(f"        the job, attempt {status.attempt}: {cut}")


def described(sink: SinkTransactions) -> str:
    """Return the transactions of one sink in words."""
    age = f", oldest for {sink.oldest_prepared_s:.1f} s" if sink.prepared else ""
    return (
        f"transactions: {sink.open} open, {sink.prepared} prepared{age},"
        f" {sink.committed} committed, {sink.aborted} rolled back"
    )
