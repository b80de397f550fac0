"""Calls to services: their order, their limits, and what a snapshot has of them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.support.drawn_seeds import draw_random
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow import AsyncFunction, CallRetries
from onceflow.core.errors import StateIncompatible, UserFunctionError
from onceflow.core.plan.async_functions import Call, idempotency_key, limit_calls
from onceflow.core.plan.work import MapAsync
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow.async_operator import AsyncOperator
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.dead_letters import DEAD_LETTERS_TAG
from onceflow.core.state.states.operator_state import OperatorStateStore

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
DEADLINE_S = 60.0
Row = dict[str, Any]


class Service:
    """A service that answers a call when the test says so."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.running = self.running_max = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._changed = threading.Condition()

    async def __call__(self, record: Row) -> Any:
        answer = asyncio.get_running_loop().create_future()
        with self._changed:
            self.calls[record["id"]] += 1
            self.running += 1
            self.running_max = max(self.running_max, self.running)
            self._answers[record["id"]] = answer
            self._changed.notify_all()
        try:
            return await answer
        finally:
            with self._changed:
                self.running -= 1

    @property
    def waiting_ids(self) -> list[int]:
        """The ids of the calls that wait for an answer."""
        with self._changed:
            return sorted(self._answers)

    def waiting(self, count: int) -> list[int]:
        """Return the ids of the calls, once there are `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._answers) == count, DEADLINE_S)
            return sorted(self._answers)

    def answer(self, number: int, result: Any = None) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers, DEADLINE_S)
            future = self._answers.pop(number)
        value = {"id": number, "name": f"r{number}"} if result is None else result

        def finish() -> None:
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)

        future.get_loop().call_soon_threadsafe(finish)


class Running:
    """An operator, and what comes out of it: records by their ids, and watermarks as texts."""

    def __init__(
        self,
        function: Any,
        *,
        restored: tuple[MemoryStorage, Sequence[StateHandle]] | None = None,
        subtask: int = 0,
        parallelism: int = 1,
        capacity: int = 10,
        timeout: float = DEADLINE_S,
        retry: CallRetries | None = None,
        ordered: bool = True,
        rate_limit: float | None = None,
        schema: pa.Schema = SCHEMA,
        **work: Any,
    ) -> None:
        self.storage, handles = restored or (MemoryStorage(), ())
        states = OperatorStateStore(
            "calls",
            subtask=subtask,
            parallelism=parallelism,
            is_restored=restored is not None,
            handles=handles,
            reader=self.storage,
        )
        limits = limit_calls("async_map", capacity, timeout, retry, ordered, rate_limit)
        call = function if isinstance(function, AsyncFunction) else _coroutine(function)
        self.operator = AsyncOperator(
            "calls", MapAsync(call, limits, **work), states, schema, SCHEMA, "shop"
        )
        self.out: list[Any] = []
        self._woken = threading.Event()
        self.operator.attach(self._woken.set, lambda mark: self.out.append(f"w{mark}"))
        self.operator.outputs.append(
            lambda batch: self.out.extend(batch.rows.column("id").to_pylist())
        )

    def take(self, *ids: int) -> None:
        self.operator.receive(Batch(pa.record_batch([list(ids), ["x"] * len(ids)], schema=SCHEMA)))

    def expect(self, *out: Any) -> None:
        """Wait until this has come out, and nothing else."""
        self.wait(lambda: len(self.out) >= len(out))
        assert self.out == list(out)
        self.out.clear()

    def wait(self, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while True:
            self._woken.clear()
            self.operator.on_time()
            if holds():
                return
            assert time.monotonic() < until_s
            # Calls begin on another thread, which wakes only when they end.
            self._woken.wait(0.01)

    def snapshot(self) -> tuple[MemoryStorage, tuple[StateHandle, ...]]:
        done = self.operator.snapshot(CheckpointId(1)).upload(self.storage)
        return self.storage, done.raw


def _coroutine(function: Any) -> Call:
    async def call(*arguments: Any) -> Any:
        return await function(*arguments)

    return call


@pytest.fixture(name="start")
def _start(request: pytest.FixtureRequest) -> Callable[..., Running]:
    def start(function: Any, **settings: Any) -> Running:
        running = Running(function, **settings)
        request.addfinalizer(running.operator.close)
        return running

    return start


Start = Callable[..., Running]


def test_ordered_results_wait_for_those_before_and_watermarks_for_records(start: Start) -> None:
    service = Service()
    running = start(service)
    running.operator.hold_watermark(4)
    running.expect("w4")
    running.take(1, 2, 3)
    running.operator.hold_watermark(5)
    running.take(4)
    service.answer(2)
    service.answer(4)
    service.answer(1)
    running.expect(1, 2)
    service.answer(3)
    running.expect(3, "w5", 4)
    running.operator.hold_watermark(MAX_WATERMARK)
    running.expect(f"w{MAX_WATERMARK}")


def test_unordered_results_come_at_once_and_do_not_pass_a_watermark(start: Start) -> None:
    service = Service()
    running = start(service, ordered=False)
    running.take(1, 2, 3)
    running.operator.hold_watermark(5)
    running.operator.hold_watermark(6)
    running.take(4, 5)
    for number in (3, 5, 1):
        service.answer(number)
    running.wait(lambda: len(running.out) == 2)
    assert sorted(running.out) == [1, 3]
    running.out.clear()
    service.answer(2)
    running.expect(2, "w5", "w6", 5)
    service.answer(4)
    running.expect(4)


@pytest.mark.parametrize("ordered", [True, False])
def test_random_answers_keep_records_and_watermarks_in_place(start: Start, ordered: bool) -> None:
    rng, service = draw_random(), Service()
    running = start(service, ordered=ordered, capacity=7)
    expected: list[Any] = []
    open_ids: set[int] = set()

    def answer_one() -> None:
        running.wait(lambda: len(service.waiting_ids) == min(7, len(open_ids)))
        chosen = rng.choice(service.waiting_ids)
        open_ids.remove(chosen)
        service.answer(chosen)

    number = 0
    for step in range(200):
        if rng.random() < 0.4 and not running.operator.is_full:
            ids = list(range(number, number := number + rng.choice([1, 3, 20])))
            running.take(*ids)
            open_ids.update(ids)
            expected += ids
        elif rng.random() < 0.3:
            running.operator.hold_watermark(step)
            expected.append(f"w{step}")
        elif open_ids:
            answer_one()
    while open_ids:
        answer_one()
    running.wait(lambda: len(running.out) == len(expected))
    assert service.running_max == 7
    assert set(service.calls.values()) == {1}
    assert (running.out if ordered else _sorted_parts(running.out)) == expected


def _sorted_parts(out: Sequence[Any]) -> list[Any]:
    """Sort the ids between two watermarks."""
    made: list[Any] = []
    ids: list[int] = []
    for entry in [*out, ""]:
        if isinstance(entry, int):
            ids.append(entry)
        else:
            made += [*sorted(ids), entry]
            ids = []
    return made[:-1]


def test_a_snapshot_has_the_records_in_flight_and_a_restore_calls_them_again(start: Start) -> None:
    service, again = Service(), Service()
    first = start(service, capacity=2)
    first.take(1, 2, 3)
    first.take(4)
    assert first.operator.is_full
    service.answer(2)
    first.wait(lambda: service.calls[3] == 1)
    assert first.out == []
    second = start(again, restored=first.snapshot())
    second.operator.hold_watermark(7)
    second.take(5)
    for number in (5, 4, 3, 2, 1):
        again.answer(number)
    second.expect(1, 2, 3, 4, "w7", 5)
    third = start(Service(), restored=second.snapshot())
    third.operator.flush()
    assert third.out == []


def test_records_in_flight_with_other_columns_are_refused(start: Start) -> None:
    first = start(Service())
    first.take(1)
    renamed = pa.schema([("id", pa.int64()), ("title", pa.string())])
    with pytest.raises(
        StateIncompatible, match=r"'calls' with columns id int64, name string, .*dr"
    ):
        start(Service(), restored=first.snapshot(), schema=renamed)
    noted = SCHEMA.with_metadata({"note": "only this differs"})
    service = Service()
    second = start(service, restored=first.snapshot(), schema=noted)
    second.operator.on_time()
    assert service.waiting(1) == [1]


def test_as_many_blocking_calls_run_at_once_as_the_capacity_allows(start: Start) -> None:
    capacity = 2 * ((os.cpu_count() or 1) + 4)
    together = threading.Barrier(capacity)

    async def meet(record: Row) -> Row:
        await asyncio.to_thread(together.wait, DEADLINE_S)
        return record

    running = start(meet, capacity=capacity)
    running.take(*range(capacity))
    running.operator.flush()
    assert running.out == list(range(capacity))


def test_a_restore_calls_the_parts_in_flight_with_all_of_their_rows(start: Start) -> None:
    async def never(batch: pa.RecordBatch) -> pa.RecordBatch:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    first = start(never, rows_max=4)
    first.take(*range(10))
    second = start(echo, rows_max=4, restored=first.snapshot())
    second.operator.flush()
    second.expect(*range(10))


def test_records_in_flight_are_rescaled_and_stay_in_their_subtask_otherwise(start: Start) -> None:
    services = [Service() for _ in range(3)]
    handles: list[StateHandle] = []
    storage = MemoryStorage()
    for subtask in range(2):
        running = start(services[subtask], subtask=subtask, parallelism=2, restored=(storage, ()))
        running.take(*range(10 * subtask, 10 * subtask + 3))
        handles += running.snapshot()[1]
    for parallelism in (1, 2, 3):
        called: list[list[int]] = []
        for subtask in range(parallelism):
            service = Service()
            running = start(
                service, subtask=subtask, parallelism=parallelism, restored=(storage, handles)
            )
            if running.operator.due_in_s is not None:
                running.operator.on_time()
            called.append(
                service.waiting(6 // parallelism if parallelism < 3 else 3 * (subtask < 2))
            )
        assert (
            called
            == {
                1: [[0, 1, 2, 10, 11, 12]],
                2: [[0, 1, 2], [10, 11, 12]],
                3: [[0, 1, 2], [10, 11, 12], []],
            }[parallelism]
        )


def test_after_a_stop_savepoint_nothing_is_emitted_and_the_last_snapshot_has_all(
    start: Start,
) -> None:
    service = Service()
    running = start(service)
    running.take(1, 2)
    running.snapshot()
    running.operator.emission_ended = True
    service.answer(1)
    service.answer(2)
    running.operator.flush()
    again = Service()
    restored = start(again, restored=running.snapshot())
    restored.operator.on_time()
    assert again.waiting(2) == [1, 2]
    assert running.out == []


def test_failed_tries_are_repeated_and_a_try_has_a_time_limit(start: Start) -> None:
    tries: Counter[int] = Counter()

    async def flaky(record: Row) -> Row:
        tries[record["id"]] += 1
        if record["id"] == 1 and tries[1] < 3:
            raise OSError("the service is away")
        if record["id"] == 2 and tries[2] < 2:
            await asyncio.sleep(DEADLINE_S)
        return record

    running = start(flaky, timeout=0.05, retry=CallRetries(tries=3, delay=0.001))
    running.take(1, 2, 3)
    running.operator.flush()
    running.expect(1, 2, 3)
    assert tries == {1: 3, 2: 2, 3: 1}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such user"), "operator 'calls' failed: ValueError: no such user.*'id': 2"),
        (TimeoutError("no answer within 0.01 s"), "no answer within 0.01 s"),
    ],
)
def test_a_call_that_fails_fails_the_job_and_names_the_record(
    start: Start, error: Exception, message: str
) -> None:
    service = Service()
    running = start(service)
    running.take(1, 2)
    service.answer(1)
    service.answer(2, error)
    with pytest.raises(UserFunctionError, match=message) as raised:
        running.expect(1, 2)
    # An outage has no fingerprint: it is tried again for as long as the restart strategy allows.
    assert (raised.value.fingerprint == "") == isinstance(error, TimeoutError)


class AnswerError(Exception):
    """Shaped as `aiohttp.ClientResponseError`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answer {status}")
        self.status = status


class RefusedRequestError(OSError):
    """Shaped as `requests.HTTPError` for an answer 400."""

    response = AnswerError(400)


@pytest.mark.parametrize("policy", [OnBadRow.DROP, OnBadRow.DEAD_LETTER])
@pytest.mark.parametrize(
    ("error", "is_outage"),
    [
        (ConnectionRefusedError("nothing listens"), True),
        (TimeoutError("no answer"), True),
        *((AnswerError(status), True) for status in (401, 407, 408, 425, 429, 500, 503)),
        (AnswerError(404), False),
        (RefusedRequestError("400 for url"), False),
        (ValueError("too slow"), False),
    ],
    ids=repr,
)
def test_an_outage_of_the_service_leaves_out_no_record(
    start: Start, policy: OnBadRow, error: Exception, is_outage: bool
) -> None:
    async def fail(record: Row) -> Row:
        raise error

    running = start(fail, on_bad_row=policy)
    running.take(1)
    if not is_outage:
        running.operator.flush()
        assert (running.out, running.operator.rejected) == ([], 1)
        return
    with pytest.raises(UserFunctionError, match=f"{type(error).__name__}: .*'id': 1") as raised:
        running.operator.flush()
    assert running.operator.rejected == 0
    # The job ends after some tries only if a person must change something.
    assert (raised.value.fingerprint == "") == (str(error)[-3:] not in {"401", "407"})


class GreedyStop(BaseException):
    """An error that is no Exception, as test frameworks raise it."""


@pytest.mark.parametrize("policy", OnBadRow)
@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), GreedyStop()],
    ids=repr,
)
def test_a_call_that_ends_its_task_or_process_fails_with_a_named_error(
    start: Start, policy: OnBadRow, error: BaseException
) -> None:
    async def leave(record: Row) -> Row:
        raise error

    running = start(leave, on_bad_row=policy)
    running.take(1)
    with pytest.raises(UserFunctionError, match=f"the call raised .*{type(error).__name__}"):
        running.wait(lambda: False)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3)], ids=repr)
def test_an_open_that_ends_its_task_or_process_fails_with_a_named_error(
    start: Start, error: BaseException
) -> None:
    class Leaving(AsyncFunction):
        async def open(self) -> None:
            raise error

        async def __call__(self, record: Row) -> Row:
            return record

    running = start(Leaving())
    with pytest.raises(UserFunctionError, match=type(error).__name__):
        running.take(1)


@pytest.mark.parametrize("policy", [OnBadRow.DROP, OnBadRow.DEAD_LETTER])
def test_records_whose_calls_fail_are_left_out_if_that_is_wanted(
    start: Start, policy: OnBadRow
) -> None:
    async def picky(record: Row) -> Row:
        if record["id"] % 2:
            raise ValueError(f"no {record['id']}")
        return record

    running = start(picky, on_bad_row=policy)
    letters: list[Row] = []
    aside = cast("dict[str, Any]", vars(running.operator)["_aside"])
    if policy is OnBadRow.DEAD_LETTER:

        def keep(batch: Batch) -> None:
            letters.extend(batch.rows.to_pylist())

        aside[DEAD_LETTERS_TAG] = [keep]
    running.take(1, 2, 3)
    running.operator.flush()
    assert (running.out, running.operator.rejected) == ([2], 2)
    reasons = [(letter["reason"], letter["operator"]) for letter in letters]
    named = [("ValueError: no 1", "calls"), ("ValueError: no 3", "calls")]
    assert reasons == (named if policy is OnBadRow.DEAD_LETTER else [])


@pytest.mark.parametrize(
    "result", [[{"id": 1, "name": "a"}, {"id": 2, "name": "b"}], [], {"id": 1}]
)
def test_a_call_returns_any_number_of_records_of_the_schema(start: Start, result: Any) -> None:
    async def answer(record: Row) -> Any:
        return result

    running = start(answer)
    running.take(7)
    if isinstance(result, dict):
        with pytest.raises(UserFunctionError, match="without column 'name'"):
            running.operator.flush()
        return
    running.operator.flush()
    assert running.out == [one["id"] for one in result]


def test_the_key_of_a_record_is_the_same_in_each_call(start: Start) -> None:
    keys: dict[int, set[str]] = {}

    async def keep(record: Row, key: str) -> Row:
        keys.setdefault(record["id"], set()).add(key)
        return record

    for _ in range(2):
        running = start(keep, idempotency_key=("id", "name"))
        running.take(1, 2)
        running.operator.flush()
    assert [len(of_record) for of_record in keys.values()] == [1, 1]
    assert keys[1] != keys[2]
    # Services compare the key with that of an earlier version: it must never change.
    assert idempotency_key("shop", "calls", (1, "x")) in keys[1]
    assert idempotency_key("shop", "calls", 1) == "9d20d40452f04affc0cc376be450f69daf82040c"
    assert idempotency_key("shop", "other", 1) != idempotency_key("shop", "calls", 1)


def test_calls_begin_at_the_rate_that_is_allowed(start: Start) -> None:
    times: list[float] = []

    async def note(record: Row) -> Row:
        times.append(asyncio.get_running_loop().time())
        return record

    running = start(note, rate_limit=50)
    running.take(*range(6))
    running.operator.flush()
    assert times[-1] - times[0] >= 5 / 50 * 0.99


class Client(AsyncFunction):
    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def open(self) -> None:
        self._log.append(f"open {threading.current_thread().name}")

    async def __call__(self, record: Row) -> Row:
        self._log.append(f"call {threading.current_thread().name}")
        return record

    async def close(self) -> None:
        self._log.append(f"close {threading.current_thread().name}")


def test_a_function_opens_and_closes_its_resources_on_the_loop_of_its_calls(start: Start) -> None:
    log: list[str] = []
    running = start(Client(log))
    running.take(1)
    running.operator.flush()
    running.operator.close()
    running.operator.close()
    assert log == ["open calls calls", "call calls calls", "close calls calls"]


def test_parts_of_batches_are_called_and_restored(start: Start) -> None:
    sizes: deque[int] = deque()

    async def count(batch: pa.RecordBatch) -> pa.RecordBatch:
        sizes.append(batch.num_rows)
        return batch

    running = start(count, rows_max=4)
    running.take(*range(10))
    restored = start(count, rows_max=4, restored=running.snapshot())
    running.operator.flush()
    running.expect(*range(10))
    assert sorted(sizes) == [2, 4, 4]
    sizes.clear()
    restored.operator.flush()
    restored.expect(*range(10))
    assert sum(sizes) == 10
    assert max(sizes) <= 4

    async def wrong(batch: pa.RecordBatch) -> Any:
        return batch.num_rows

    running = start(wrong, rows_max=4)
    running.take(1)
    with pytest.raises(UserFunctionError, match="returned int"):
        running.operator.flush()
