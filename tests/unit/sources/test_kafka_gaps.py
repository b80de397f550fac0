"""Tests where a Kafka reader continues if the broker lacks its offset, or its records."""

from __future__ import annotations

import logging
from typing import cast

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from onceflow.clients.kafka.client import ClientTroubles
from onceflow.core.errors import OffsetOutOfRange, SourceError
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.events import Event, Gaps, classify_error, is_cut
from onceflow.sources.kafka.position import cut_error, gap_error

_CUT = (
    "Partition log truncation detected at offset 100 (leader epoch 0): broker end offset is 50"
    " (offset leader epoch 0). Reset to INVALID.: Local: Partition log truncation detected"
)


class _Consumer:
    """A client that tells which offsets there are."""

    def get_watermark_offsets(
        self, asked: TopicPartition, *, timeout: float, cached: bool
    ) -> tuple[int, int]:
        del asked, timeout, cached
        return 0, 150


def _resume(*, fail_on_data_loss: bool, was_cut: bool) -> int:
    source = KafkaSource(
        "localhost:9", topic="t", schema="id BIGINT", fail_on_data_loss=fail_on_data_loss
    )
    consumer = cast("Consumer", _Consumer())
    return Gaps(source.settings).find_resume_offset(consumer, "t", 0, 100, was_cut=was_cut)


def test_a_log_that_was_cut_off_and_has_grown_again_is_refused_though_the_offset_exists() -> None:
    with pytest.raises(OffsetOutOfRange, match=r"t-0: offset 100 was.*cut off before it.*0 to 149"):
        _resume(fail_on_data_loss=True, was_cut=True)


@pytest.mark.parametrize("was_cut", [True, False])
def test_who_accepts_that_a_log_was_cut_is_told_what_is_read_twice(was_cut: bool) -> None:
    """The log may have grown beyond the offset again, or end before it."""
    error = (
        cut_error("t", 0, offset_next=100, low=7, high=150)
        if was_cut
        else gap_error("t", 0, offset_next=100, low=7, high=50)
    )
    advice = "First delete the rows from the target that came from offset 7 on, or they are there"
    assert advice in str(error)


def test_where_loss_is_accepted_it_is_read_from_its_first_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert _resume(fail_on_data_loss=False, was_cut=True) == 0
    assert "going on at 0" in caplog.text


def test_an_offset_that_a_replica_did_not_have_yet_is_read_on() -> None:
    assert _resume(fail_on_data_loss=True, was_cut=False) == 100


def test_a_cut_is_told_from_an_offset_out_of_range() -> None:
    reset = KafkaError._AUTO_OFFSET_RESET  # pyright: ignore[reportPrivateUsage]
    assert is_cut(KafkaError(reset, _CUT))
    assert is_cut(KafkaError(-139))
    assert not is_cut(KafkaError(reset, "fetch failed due to requested offset not available"))
    assert not is_cut(None)


def _classify(error: KafkaError, topic: str) -> Event:
    settings = KafkaSource("localhost:9", topic="t", schema="id BIGINT").settings
    troubles = ClientTroubles(settings)
    return classify_error(error, settings, troubles, topic=topic, partition=0, offset_next=7)


def test_an_answer_that_is_not_received_whole_is_no_damaged_log() -> None:
    error = KafkaError(KafkaError._BAD_MSG, "FindCoordinator response error: Bad message format")
    assert _classify(error, "") is Event.TROUBLE
    with pytest.raises(SourceError, match=r"t-0 cannot be read on from offset 7.*log is damaged"):
        _classify(error, "t")
