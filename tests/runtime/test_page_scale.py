"""The page of a job with 1,000 subtasks, 10,000 checkpoints and many partitions: how fast it is."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.support.chromium import Tab, start_chromium
from tests.unit.runtime.test_job_api import INSTANCE, TOKEN, Job

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import SnapshotTimings
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import SinkMetrics, SubtaskMetrics
from onceflow.core.runtime.driver.http_server import HttpServer
from onceflow.core.runtime.driver.job_api import JobApi
from onceflow.core.runtime.driver.job_views import EdgeView, GraphView, OperatorView
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.events.job_history import CHECKPOINTS_MAX, INCIDENTS_MAX
from onceflow.core.runtime.events.status import JobStatus, apply
from onceflow.core.spi.source import SplitOffsets

SLOTS = 250
CHAINS = ("payments", "enrich", "balance", "audit")
PARTITIONS = 500
FIRST_PAINT_S = 1.0

# Once the numbers of the job, its graph and its checkpoints stand on the page.
WATCH_LONG_TASKS = """() => {
  window.longTasks = [];
  const take = (list) => window.longTasks.push(...list.getEntries().map((task) => task.duration));
  new PerformanceObserver(take).observe({ type: "longtask" });
}"""
WATCH_FIRST_PAINT = """
  addEventListener("DOMContentLoaded", () => {
    const look = () => {
      const parts = ["#checkpoint-bars", ".tile", ".chain", ".incidents"];
      const isPainted = parts.every((part) => document.querySelector(part));
      if (isPainted) document.documentElement.dataset.paintedAt = performance.now();
      else requestAnimationFrame(look);
    };
    look();
  });
"""


@dataclass
class LargeJob(Job):
    """A job whose past is told to its API event by event."""

    api: JobApi = field(init=False)

    def __post_init__(self) -> None:
        self.now = JobStatus("large")
        self.api = JobApi(self, INSTANCE, TOKEN)

    def tell(self, event: job_events.JobEvent) -> None:
        self.now = apply(self.now, event)
        self.api.on_event(event, self.now)

    def graph_view(self) -> GraphView:
        operators = tuple(
            OperatorView(chain, "source" if not index else "Process", "Process", chain, ())
            for index, chain in enumerate(CHAINS)
        )
        pairs = itertools.pairwise(CHAINS)
        edges = tuple(EdgeView(above, below, "by_key", ("account",)) for above, below in pairs)
        return GraphView(operators, edges, SLOTS)

    def describe_stored(self) -> Mapping[str, Any]:
        return {"location": "/kept/large", "checkpoints": [], "unfinished": []}


def at(second: float) -> job_events.Moment:
    return job_events.Moment(second, 1_000_000 + second)


def tell_past(job: LargeJob) -> None:
    """Tell the restarts, checkpoints and reports of some hours."""
    job.tell(job_events.JobStarted(frozenset({"payments"}), at=at(0)))
    for number in range(1, INCIDENTS_MAX + 1):
        job.tell(job_events.AttemptBegan(AttemptId(number), CheckpointId(0), at=at(number)))
        error = f"UserFunctionError: rate {number}\n" + "  File x, line 1\n" * 40
        job.tell(job_events.JobRestarting(0.1, error, at=at(number + 0.5)))
    job.tell(job_events.AttemptBegan(AttemptId(INCIDENTS_MAX + 1), CheckpointId(0), at=at(300)))
    for slot in range(SLOTS):
        job.tell(job_events.SlotJoined(slot, 1_000 + slot, 1, f"host-{slot % 20}", at=at(300)))
    for number in range(1, CHECKPOINTS_MAX + 1):
        second, checkpoint = 300.0 + number, CheckpointId(number)
        job.tell(job_events.CheckpointTriggered(checkpoint, CheckpointKind.PERIODIC, at=at(second)))
        # The newest in full: a thousand acks; of the others the page has the slowest subtask only.
        count = SLOTS if number > CHECKPOINTS_MAX - 5 else 1
        for chain in CHAINS:
            for index in range(count):
                timings = SnapshotTimings(sync_ms=10 + number % 17)
                job.tell(
                    job_events.CheckpointAcked(
                        checkpoint, SubtaskRef(chain, index), timings, at=at(second + 0.1)
                    )
                )
        job.tell(job_events.CheckpointCompleted(checkpoint, 5.0, at=at(second + 0.2)))
    splits = tuple(
        SplitOffsets(f"payments-{index}", index * 10, index * 17) for index in range(PARTITIONS)
    )
    job.tell(job_events.LagMeasured("payments", splits, at=at(11_000)))


def report(job: LargeJob, second: int) -> None:
    """Tell one heartbeat of every slot."""
    for slot in range(SLOTS):
        metrics = tuple(
            SubtaskMetrics(SubtaskRef(chain, slot), 100 * second, 100 * second, 0.5 * second, 0.1)
            for chain in CHAINS
        )
        sink = SinkMetrics("audit", "large.audit", slot, open=1, rows_committed=90 * second)
        job.tell(
            job_events.SlotReported(slot, metrics, (sink,), 200_000_000, at=at(11_000 + second))
        )


@pytest.fixture(scope="module")
def large_job() -> Iterator[tuple[LargeJob, str]]:
    job = LargeJob()
    tell_past(job)
    for second in range(4):
        report(job, second)
    server = HttpServer("127.0.0.1", 0, job.api)
    server.start("large job")
    yield job, f"http://127.0.0.1:{server.port}"
    server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with start_chromium() as browser:
        yield browser


@contextmanager
def open_signed_in(browser: Browser, url: str) -> Generator[Tab, None, None]:
    """Open the page as somebody who has signed in before; note when it shows the job."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        context.add_init_script(
            f"sessionStorage.setItem('onceflow-token', '{TOKEN}');{WATCH_FIRST_PAINT}"
        )
        tab = Tab.watch(context.new_page())
        tab.page.goto(url)
        yield tab
        assert tab.violations == []
    finally:
        context.close()


def await_paint(page: Page) -> float:
    """Return seconds from the request of the page until the job stood on it."""
    painted = page.locator("html[data-painted-at]")
    painted.wait_for(timeout=60_000)
    return float(painted.get_attribute("data-painted-at") or "nan") / 1000


@pytest.mark.servers
def test_the_page_of_a_large_job_shows_it_within_a_second_and_stays_usable(
    browser: Browser, large_job: tuple[LargeJob, str]
) -> None:
    job, url = large_job
    taken_s: list[float] = []
    for _ in range(5):
        with open_signed_in(browser, url) as tab:
            taken_s.append(await_paint(tab.page))
    # The best of five: other work of the machine makes each of them slower, and none faster.
    assert min(taken_s) < FIRST_PAINT_S, taken_s
    with open_signed_in(browser, url) as tab:
        page = tab.page
        await_paint(page)
        page.evaluate(WATCH_LONG_TASKS)
        for second in range(4, 8):
            report(job, second)
            page.wait_for_timeout(1_000)
        expect(page.locator("dt", has_text="Records read")).to_be_visible()
        longest_ms = page.evaluate("Math.max(0, ...window.longTasks)")
        assert longest_ms < 300, "the page does not answer meanwhile"
        page.locator("#chain-balance").click()
        expect(page.get_by_role("dialog")).to_contain_text("250 subtasks, the busiest first")
