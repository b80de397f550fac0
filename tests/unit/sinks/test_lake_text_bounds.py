"""Short bounds of long texts lie above the texts, and can be written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onceflow.sinks.lake.data_files import shorten_upper_text

EDGES = st.sampled_from("a\ud7ff\ue000\uffff\U00010000\U0010fffe\U0010ffff")


@given(st.text(EDGES | st.characters(codec="utf-8"), max_size=8), st.integers(1, 5))
def test_a_bound_is_not_below_its_text_and_not_longer_than_allowed(text: str, length: int) -> None:
    bound = shorten_upper_text(text, length)
    if bound is None:
        assert text[:length] == "\U0010ffff" * length
        return
    assert bound >= text
    assert bound.encode() >= text.encode(), "readers compare bytes"
    assert len(bound) <= length


def test_the_character_after_the_last_one_before_surrogates_is_one_that_utf8_has() -> None:
    assert shorten_upper_text("a\ud7ffb", 2) == "a\ue000"
