"""Advice about bad records is given only where it is not followed already."""

from __future__ import annotations

import logging

import pytest
from confluent_kafka import Message

from onceflow.core.errors import BadRecord
from onceflow.core.spi import OnBadRow
from onceflow.sources.kafka.messages import Refusals


def _message() -> Message:
    return Message(topic="payments", partition=3, offset=17, key=b"key", value=b"no JSON")


@pytest.mark.parametrize("policy", [OnBadRow.DEAD_LETTER, OnBadRow.DROP])
def test_a_warning_of_a_bad_record_advises_nothing_that_is_set(
    policy: OnBadRow, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Refusals(policy).refuse(_message(), "it is not JSON")
    assert "payments-3 offset 17: it is not JSON. The value starts 'no JSON'" in caplog.text
    assert "on_bad_record" not in caplog.text
    assert "dead_letters=" not in caplog.text


def test_a_bad_record_that_ends_the_job_names_the_settings_that_keep_or_drop_it() -> None:
    with pytest.raises(BadRecord, match="on_bad_record='dead_letter'.*on_bad_record='drop'"):
        Refusals(OnBadRow.FAIL).refuse(_message(), "it is not JSON")


def test_a_bad_record_without_a_value_is_described_without_an_excerpt() -> None:
    tombstone = Message(topic="payments", partition=3, offset=17, key=b"key", value=None)
    with pytest.raises(BadRecord, match=r"^payments-3 offset 17: it has no value\. Correct"):
        Refusals(OnBadRow.FAIL).refuse(tombstone, "it has no value")
