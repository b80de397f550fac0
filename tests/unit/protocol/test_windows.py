"""Panes and windows, compared with windows found one by one."""

from __future__ import annotations

import pytest

from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK, PaneWindows

KINDS = [
    PaneWindows(10, 10),
    PaneWindows(10, 10, 3, 4),
    PaneWindows(12, 4),
    PaneWindows(10, 4, 1, 7),
    PaneWindows(9, 6, 5, 30),
]
MOMENTS = range(-60, 60)


def ends_one_by_one(windows: PaneWindows, moment: int) -> list[int]:
    """The ends of the windows that hold `moment`, as Flink's assigners find them."""
    starts = range(-200, 200)
    return [
        start + windows.size_ms
        for start in starts
        if (start - windows.offset_ms) % windows.slide_ms == 0
        and start <= moment < start + windows.size_ms
    ]


def pane_at(windows: PaneWindows, moment: int) -> int:
    return (moment - windows.offset_ms) // windows.pane_ms


@pytest.mark.parametrize("windows", KINDS, ids=str)
def test_a_moment_is_in_the_windows_of_its_pane_and_in_no_other(windows: PaneWindows) -> None:
    for moment in MOMENTS:
        pane = pane_at(windows, moment)
        assert windows.start_of(pane) <= moment < windows.start_of(pane + 1)
        ends = ends_one_by_one(windows, moment)
        assert list(windows.ends_of(pane)) == ends
        for end in ends:
            assert pane in windows.panes_of(end)
            assert windows.start_of(windows.panes_of(end).start) == end - windows.size_ms


@pytest.mark.parametrize("windows", KINDS, ids=str)
def test_a_record_is_late_when_all_its_windows_are_over(windows: PaneWindows) -> None:
    for moment in MOMENTS:
        last = max(ends_one_by_one(windows, moment)) - 1 + windows.lateness_ms
        for watermark in MOMENTS:
            assert (pane_at(windows, moment) <= windows.last_over(watermark)) == (last <= watermark)
    assert windows.last_over(NO_WATERMARK) < pane_at(windows, -(1 << 60))


@pytest.mark.parametrize("windows", KINDS, ids=str)
def test_windows_are_due_once_as_the_watermark_rises_and_nothing_is_missed_between(
    windows: PaneWindows,
) -> None:
    panes = {pane_at(windows, moment) for moment in (-30, -7, 0, 1, 2, 25)}
    expected = sorted({end for pane in panes for end in windows.ends_of(pane)})
    found: list[int] = []
    before = NO_WATERMARK
    for watermark in (-31, -20, -19, 0, 3, 4, 11, 60, MAX_WATERMARK):
        due = windows.due(panes, before, watermark)
        next_ms = windows.next_ms(panes, before)
        assert not due or (next_ms is not None and next_ms <= due[0] - 1)
        found += due
        before = watermark
    assert found == expected
    assert windows.next_ms((), 0) is None
