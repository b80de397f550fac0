"""Short upper bounds of long texts, for the statistics of data files."""

from __future__ import annotations

_LAST_BEFORE_SURROGATES, _FIRST_AFTER_SURROGATES = 0xD7FF, 0xE000
_LAST_CHARACTER = 0x10FFFF


def shorten_upper_text(text: str, length_max: int) -> str | None:
    """Return a text of at most `length_max` characters that is not below `text`.

    Return None if there is no such text. Texts are ordered by code points. UTF-8 has no surrogates,
    U+D800 to U+DFFF, so the character after U+D7FF is U+E000.
    """
    if len(text) <= length_max:
        return text
    kept = text[:length_max].rstrip(chr(_LAST_CHARACTER))
    if not kept:
        return None
    code = ord(kept[-1])
    following = _FIRST_AFTER_SURROGATES if code == _LAST_BEFORE_SURROGATES else code + 1
    return kept[:-1] + chr(following)
