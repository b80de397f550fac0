"""The restart strategies, which decide if and when another attempt follows a failed one.

A strategy is a frozen setting. Its tracker counts the failures of one job's run in one driver. No
strategy is asked after an error that must never restart the job: the driver checks that first.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from onceflow.core.argument_types import check_fields
from onceflow.core.setting_values import Seconds, accept_durations, declare_seconds

_MISTAKES_KEPT = 100
"""The number of mistakes kept. Several slots may each have a failing record, so failures
alternate."""


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """The decision to start the next attempt in `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The decision that the job has failed."""

    reason: str


RestartDecision: TypeAlias = RestartAfter | GiveUp


class RestartTracker(Protocol):
    """A counter of failures; used by the driver's thread."""

    def on_running(self, now_s: float) -> None:
        """Record that an attempt now runs on all slots."""

    def on_failure(self, now_s: float, mistake: str = "") -> RestartDecision:
        """Record that the attempt failed; return whether and when to restart.

        `mistake` is equal for equal mistakes of the program: the same record failing the same way.
        It is empty for all other failures.
        """
        ...


class RestartStrategy(Protocol):
    """The settings of a strategy, which can be pickled and printed."""

    def tracker(self, rng: random.Random) -> RestartTracker:
        """Return a tracker that has seen no failure yet; `rng` draws its jitter."""
        ...


@dataclass(frozen=True, slots=True)
class NoRestart:
    """A strategy without restarts: the first failure ends the job."""

    def tracker(self, rng: random.Random) -> RestartTracker:
        """Return a tracker that gives up at once."""
        del rng
        return _FixedDelayTracker(FixedDelay(attempts=0, delay_s=0.0))


@accept_durations
@check_fields
@dataclass(frozen=True, slots=True)
class FixedDelay:
    """A strategy that restarts up to `attempts` times, `delay_s` after each failure."""

    attempts: int = 3
    delay_s: Seconds = declare_seconds(1.0)

    def __post_init__(self) -> None:
        _require(self.attempts >= 0, "attempts", self.attempts, "0 or more")
        _require(self.delay_s >= 0, "delay_s", self.delay_s, "0 or more")

    def tracker(self, rng: random.Random) -> RestartTracker:
        """Return a tracker that counts down."""
        del rng
        return _FixedDelayTracker(self)


@accept_durations
@check_fields
@dataclass(frozen=True, slots=True)
class ExponentialDelay:
    """A strategy that waits longer after each failure.

    The delay starts again after an attempt has run for `reset_after_s` without a failure.
    `attempts` is the maximum number of restarts since the last such reset; None: no limit.

    `same_mistakes` is the number of equal mistakes after which the job is given up; None: no limit.
    A mistake is a record that fails in the same way, or a sink that refuses rows in the same way
    without progress. Other failures in between do not matter.

    `jitter` is the share of the delay that is random, in both directions, so that many jobs do not
    restart at the same time.
    """

    initial_delay_s: Seconds = declare_seconds(1.0)
    multiplier: float = 1.5
    max_delay_s: Seconds = declare_seconds(60.0)
    jitter: float = 0.1
    reset_after_s: Seconds = declare_seconds(3600.0)
    attempts: int | None = None
    same_mistakes: int | None = 3

    def __post_init__(self) -> None:
        _require(self.initial_delay_s > 0, "initial_delay_s", self.initial_delay_s, "over 0")
        _require(self.multiplier >= 1, "multiplier", self.multiplier, "1 or more")
        _require(
            self.max_delay_s >= self.initial_delay_s,
            "max_delay_s",
            self.max_delay_s,
            f"initial_delay_s={self.initial_delay_s} or more",
        )
        _require(0 <= self.jitter <= 1, "jitter", self.jitter, "0..1")
        _require(self.reset_after_s > 0, "reset_after_s", self.reset_after_s, "over 0")
        if self.attempts is not None:
            _require(self.attempts >= 0, "attempts", self.attempts, "0 or more, or None")
        _require_same_mistakes(self.same_mistakes)

    def tracker(self, rng: random.Random) -> RestartTracker:
        """Return a tracker that starts at `initial_delay_s`."""
        return _ExponentialDelayTracker(self, rng)


@accept_durations
@check_fields
@dataclass(frozen=True, slots=True)
class FailureRate:
    """A strategy that gives up after more than `failures` failures within `interval_s`.

    Otherwise it restarts `delay_s` after each failure. `same_mistakes` is that of
    `ExponentialDelay`: it ends a job whose long attempts all fail in the same way, but never too
    often within the interval. An attempt that runs for `interval_s` clears that count.
    """

    failures: int = 3
    interval_s: Seconds = declare_seconds(300.0)
    delay_s: Seconds = declare_seconds(1.0)
    same_mistakes: int | None = 3

    def __post_init__(self) -> None:
        _require(self.failures >= 0, "failures", self.failures, "0 or more")
        _require(self.interval_s > 0, "interval_s", self.interval_s, "over 0")
        _require(self.delay_s >= 0, "delay_s", self.delay_s, "0 or more")
        _require_same_mistakes(self.same_mistakes)

    def tracker(self, rng: random.Random) -> RestartTracker:
        """Return a tracker with an empty window."""
        del rng
        return _FailureRateTracker(self)


class _Mistakes:
    """The mistakes made since an attempt last ran for long enough."""

    def __init__(self, same_max: int | None, reset_after_s: float) -> None:
        self._same_max = same_max
        self._reset_after_s = reset_after_s
        self._running_since_s: float | None = None
        self._seen: deque[str] = deque(maxlen=_MISTAKES_KEPT)

    def on_running(self, now_s: float) -> None:
        self._running_since_s = now_s

    def on_failure(self, now_s: float) -> bool:
        """Return True, and forget all mistakes, if the failed attempt had run for long enough."""
        # An attempt that fails before it runs must not count the running time of an earlier one.
        since_s, self._running_since_s = self._running_since_s, None
        has_run = since_s is not None and now_s - since_s >= self._reset_after_s
        if has_run:
            self._seen.clear()
        return has_run

    def judge(self, mistake: str) -> GiveUp | None:
        """Count `mistake`; return the reason to give the job up, or None."""
        if not mistake or self._same_max is None:
            return None
        self._seen.append(mistake)
        if self._seen.count(mistake) < self._same_max:
            return None
        return GiveUp(
            f"the job failed in the same way {self._same_max} times, and"
            f" same_mistakes={self._same_max}"
        )


class _FixedDelayTracker:
    def __init__(self, settings: FixedDelay) -> None:
        self._settings = settings
        self._failures = 0

    def on_running(self, now_s: float) -> None:
        """Reset nothing: the bound applies to the whole run."""

    def on_failure(self, now_s: float, mistake: str = "") -> RestartDecision:
        del now_s, mistake
        self._failures += 1
        if self._failures > self._settings.attempts:
            return GiveUp(f"failure {self._failures}, {self._settings.attempts} restarts allowed")
        return RestartAfter(self._settings.delay_s)


class _ExponentialDelayTracker:
    def __init__(self, settings: ExponentialDelay, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._delay_s = settings.initial_delay_s
        self._failures = 0
        self._mistakes = _Mistakes(settings.same_mistakes, settings.reset_after_s)

    def on_running(self, now_s: float) -> None:
        self._mistakes.on_running(now_s)

    def on_failure(self, now_s: float, mistake: str = "") -> RestartDecision:
        settings = self._settings
        if self._mistakes.on_failure(now_s):
            self._delay_s = settings.initial_delay_s
            self._failures = 0
        self._failures += 1
        if (given_up := self._mistakes.judge(mistake)) is not None:
            return given_up
        if settings.attempts is not None and self._failures > settings.attempts:
            return GiveUp(
                f"failure {self._failures} without {settings.reset_after_s} s of running in "
                f"between, {settings.attempts} restarts allowed"
            )
        delay_s = self._delay_s
        self._delay_s = min(delay_s * settings.multiplier, settings.max_delay_s)
        # Do not add the jitter to the growing delay, or it would accumulate.
        return RestartAfter(delay_s * (1 + settings.jitter * self._rng.uniform(-1.0, 1.0)))


class _FailureRateTracker:
    def __init__(self, settings: FailureRate) -> None:
        self._settings = settings
        # Remember one failure more than is allowed: the oldest of them shows whether they fit into
        # the interval.
        self._failed_at_s: deque[float] = deque(maxlen=settings.failures + 1)
        self._mistakes = _Mistakes(settings.same_mistakes, settings.interval_s)

    def on_running(self, now_s: float) -> None:
        # Failures leave the window only by age.
        self._mistakes.on_running(now_s)

    def on_failure(self, now_s: float, mistake: str = "") -> RestartDecision:
        settings = self._settings
        self._mistakes.on_failure(now_s)
        if (given_up := self._mistakes.judge(mistake)) is not None:
            return given_up
        self._failed_at_s.append(now_s)
        over = len(self._failed_at_s) > settings.failures
        if over and now_s - self._failed_at_s[0] <= settings.interval_s:
            return GiveUp(
                f"{len(self._failed_at_s)} failures within {settings.interval_s} s, "
                f"{settings.failures} allowed"
            )
        return RestartAfter(settings.delay_s)


def _require_same_mistakes(same_mistakes: int | None) -> None:
    if same_mistakes is not None:
        _require(same_mistakes >= 1, "same_mistakes", same_mistakes, "1 or more, or None")


def _require(holds: bool, name: str, value: float, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value} must be {expected}")
