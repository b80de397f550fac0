"""Tests that a value which a JSON column would lose is found before it is sent."""

from __future__ import annotations

import pytest

from onceflow.clients.sql.values import find_binary_fault, find_double_fault, find_syntax_fault


@pytest.mark.parametrize("text", ["", "{", "[1,]", "{'a': 1}", "NaN", "-Infinity", "01", "\x01"])
def test_text_that_is_no_json_is_named_so(text: str) -> None:
    for find_fault in (find_syntax_fault, find_binary_fault, find_double_fault):
        assert "not JSON" in str(find_fault(text))


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[]",
        '{"a": {"a": 1}, "b": {"a": 1}}',
        "1.5",
        "0.1",
        "-9223372036854775808",
        "18446744073709551615",
        "1e22",
        "9007199254740993",
        '"\\ud83d\\ude00"',
        "-0",
        "1.10",
    ],
)
def test_a_document_that_keeps_its_meaning_has_no_fault(text: str) -> None:
    for find_fault in (find_syntax_fault, find_binary_fault, find_double_fault):
        assert find_fault(text) is None


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"": 0, "a": 1, "": 2}}]'])
def test_a_key_that_comes_twice_is_a_fault_where_the_document_is_parsed(text: str) -> None:
    assert find_syntax_fault(text) is None
    for find_fault in (find_binary_fault, find_double_fault):
        assert "twice" in str(find_fault(text))


@pytest.mark.parametrize(
    "text", ["18446744073709551616", "1e400", "0.12345678901234567890123", f"[{'9' * 5000}]"]
)
def test_a_number_that_a_double_alters_is_a_fault_of_mysql_alone(text: str) -> None:
    assert find_binary_fault(text) is None
    assert "double" in str(find_double_fault(text))


@pytest.mark.parametrize("text", ['["\\u0000"]', '{"\\ud800": 1}', '{"a": ["\\udc00x"]}'])
def test_what_utf8_or_postgres_has_no_letter_for_is_a_fault_of_jsonb(text: str) -> None:
    assert find_syntax_fault(text) is None
    assert find_binary_fault(text) is not None


def test_a_document_that_is_too_deep_is_a_fault_and_no_error() -> None:
    assert "deep" in str(find_binary_fault("[" * 100_000))


LARGEST, LONGEST = "9" * 131_072, "1." + "0" * 16_383


@pytest.mark.parametrize(
    "text", ["1e131071", "0.001e131074", "-1e-16383", "[0e200]", LARGEST, LONGEST], ids=len
)
def test_a_number_that_numeric_holds_is_no_fault_of_jsonb(text: str) -> None:
    assert find_binary_fault(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "1e131072",
        "12e131071",
        "1e-16384",
        "[0e-20000]",
        '{"a": 1e99999999999999999999}',
        f"{LARGEST}9",
        f"{LONGEST}0",
    ],
    ids=len,
)
def test_a_number_that_numeric_does_not_hold_is_a_fault_of_jsonb_alone(text: str) -> None:
    assert find_syntax_fault(text) is None
    assert "numeric" in str(find_binary_fault(text))
