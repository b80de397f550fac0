"""The words for what goes wrong with offsets and records."""

from __future__ import annotations

_EXCERPT_BYTES = 64


def gap_text(topic: str, partition: int, *, wanted: int, low: int, high: int) -> str:
    """Say which records are gone from `topic`-`partition`, and what can be done."""
    where = f"{topic}-{partition}: offset {wanted} was to be read next"
    if wanted < low:
        return (
            f"{where}, but the earliest one left is {low}: {low - wanted} offsets ({wanted} to"
            f" {low - 1}) were deleted before they were read, by retention or by hand. Restore"
            " them and raise the topic's retention, or accept the loss with"
            f" fail_on_data_loss=False, which goes on at {low}"
        )
    return (
        f"{where}, but the topic ends at {high}: it was deleted and created again, or an unclean"
        f" leader election cut off its end. What it holds now ({low} to {high - 1}) are other"
        f" records than those read before. Start the job anew, or accept it with"
        f" fail_on_data_loss=False, which goes on at {low}"
    )


def excerpt(value: bytes | None) -> str:
    """Return the start of `value`, printable and short."""
    if value is None:
        return "no value (a tombstone)"
    shown = repr(value[:_EXCERPT_BYTES])[1:]
    return f"{shown} ({len(value)} bytes)" if len(value) > _EXCERPT_BYTES else shown
