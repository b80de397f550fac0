"""The form of a driver's token, which the driver and all its clients check."""

from __future__ import annotations

import re

EXPECTED_FORM = "one line of 16 to 512 ASCII characters without spaces"
"""A description of the form, for error messages."""
_TOKEN = re.compile(r"[!-~]{16,512}")


def is_token(text: str) -> bool:
    """Return True if `text` has EXPECTED_FORM. Such a text cannot end a header line early."""
    return _TOKEN.fullmatch(text) is not None
