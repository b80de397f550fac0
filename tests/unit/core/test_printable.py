"""Text from records in messages steers no terminal and forges no line of a log."""

from __future__ import annotations

import logging
import pickle
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from onceflow.cli.terminal import print_listing, say
from onceflow.clients.sql.session import DuplicateKey
from onceflow.core.errors import BadRow
from onceflow.core.printable import escape_controls, escape_terminal_codes
from onceflow.core.runtime.json_logs import TextFormatter

HOSTILE = "key \x1b[2J\x9b31m\r\n2026-11-28 ERROR forged\u202e\u2028\x07\x00"


def _controls_in(text: str) -> str:
    return "".join(c for c in text if unicodedata.category(c) == "Cc" or c in "\u2028\u2029\u202e")


@given(st.text())
def test_an_escaped_line_is_one_line_without_control_characters(text: str) -> None:
    line = escape_controls(text)
    assert len(line.splitlines()) <= 1
    assert _controls_in(line) == ""
    assert set(_controls_in(escape_terminal_codes(text))) <= set("\t\n\u2028\u2029")


def test_printable_text_of_any_language_is_left_as_it_is() -> None:
    text = "Grüße, 漢字 и кириллица 🙂 עברית"
    assert escape_controls(text) == escape_terminal_codes(text) == text


def test_an_error_has_no_escape_sequence_and_keeps_its_lines() -> None:
    error = BadRow(f"first line\nsecond line: {HOSTILE}")
    assert set(_controls_in(str(error))) <= set("\n\u2028")
    assert str(error).startswith("first line\nsecond line: key \\x1b[2J\\x9b31m\\r\n")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_what_a_database_says_of_a_row_is_one_line() -> None:
    assert _controls_in(str(DuplicateKey(f"Key (id)=({HOSTILE}) already exists", "23505"))) == ""


def test_a_line_of_the_log_has_no_escape_sequence() -> None:
    record = logging.LogRecord("onceflow", logging.ERROR, "", 0, "%s", (HOSTILE,), None)
    assert set(_controls_in(TextFormatter().format(record))) <= set("\n\u2028")


def test_the_command_line_prints_no_escape_sequence_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(HOSTILE)
    print_listing(Console(highlight=False), ["NAME"], [[(HOSTILE, "")]])
    printed = capsys.readouterr()
    assert set(_controls_in(printed.err)) <= set("\n\u2028")
    assert len(printed.out.splitlines()) == 2
