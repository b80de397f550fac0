"""The escaping of control characters in messages.

Text from records and servers must not control a terminal or forge a log line. A terminal interprets
escape sequences, and bidirectional controls make it show text in another order. Both can be in
keys, values and server errors that a message quotes.
"""

from __future__ import annotations

import re

_STEERS_TERMINAL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
_TERMINAL = re.compile(f"[{_STEERS_TERMINAL}]")
_LINE = re.compile(rf"[{_STEERS_TERMINAL}\t\n\u2028\u2029]")


def escape_controls(text: str) -> str:
    r"""Return `text` as one line, with control characters as Python escapes: \x1b."""
    return _LINE.sub(_spell, text)


def escape_terminal_codes(text: str) -> str:
    """Return `text` with its line breaks, and all other control characters escaped.

    For messages of several lines, such as tracebacks.
    """
    return _TERMINAL.sub(_spell, text)


def _spell(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]
