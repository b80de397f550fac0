"""Storage in a bucket whose token expires, whose listings are late, whose requests cost money."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.careless_store import CarelessStore
from tests.unit.storage.storage_samples import decision

from onceflow import ObjectStorage
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage import JobStorage
from onceflow.core.storage.filesystems.bucket import BucketFiles
from onceflow.core.storage.filesystems.bucket_settings import (
    PART_BYTES_MIN,
    BucketSettings,
    Patience,
)
from onceflow.core.storage.filesystems.filesystem import AlreadyExists, Created, StorageRefused
from onceflow.core.storage.log.decision_log import DecisionUnknown

KEYS = {"access_key_id": "key", "secret_access_key": "${env:CARELESS_SECRET}"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[CarelessStore]:
    monkeypatch.setenv("CARELESS_SECRET", "not looked at")
    with CarelessStore() as store:
        yield store


def _storage(store: CarelessStore) -> JobStorage:
    storage = ObjectStorage("s3://any/checkpoints", endpoint=store.endpoint, options=KEYS)
    return storage.open("ledger")


def test_an_expired_token_is_read_again_from_its_file_by_every_kind_of_request(
    store: CarelessStore, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    store.token = "first"
    options = {**KEYS, "token": f"${{file:{token}}}", "endpoint": store.endpoint}
    files = BucketFiles(BucketSettings("s3://any", options, PART_BYTES_MIN, 4, Patience(5, 5)))
    files.write("log/0", (b"zero",))

    def rotate(number: int) -> None:
        store.token = f"token {number}"
        token.write_text(store.token)

    rotate(1)
    assert files.size("log/0") == 4, "an answer to HEAD has no body that says what is wrong"
    rotate(2)
    assert files.read("log/0") == b"zero"
    rotate(3)
    assert files.list("log") == ("0",)
    rotate(4)
    assert files.create_if_absent("log/1", b"one") == Created()
    rotate(5)
    assert files.create_if_absent("log/1", b"two") == AlreadyExists(b"one")
    rotate(6)
    assert files.write("log/2", (b"two",)) == 3
    rotate(7)
    files.delete("log/2")
    rotate(8)
    files.delete_tree("log")
    assert files.list("log") == ()
    store.token = "in no file"
    with pytest.raises(StorageRefused, match="ExpiredToken.*have expired: renew them"):
        files.read("log/0")


def test_a_listing_that_lacks_the_own_record_is_told_as_what_it_is(store: CarelessStore) -> None:
    log = _storage(store).log.claim("a driver")
    log.append(decision(0, log.attempt))
    store.lists_only = frozenset(store.objects)
    with pytest.raises(DecisionUnknown, match="does not list") as late:
        log.append(decision(1, log.attempt))
    assert "wo drivers" not in str(late.value)
    store.lists_only = None
    again = log.claim_again()
    assert [one.checkpoint for one in again.view.completed] == [CheckpointId(0), CheckpointId(1)]


def test_a_store_that_lists_late_is_refused_at_the_start(store: CarelessStore) -> None:
    store.lists_only = frozenset()
    with pytest.raises(ConfigError, match="does not list .* needs list-after-write"):
        _storage(store).check_creates()


def test_a_checkpoint_costs_one_listing(store: CarelessStore) -> None:
    storage = _storage(store)
    log = storage.log.claim("a driver")

    def complete(number: int) -> None:
        writer = storage.writer(log.attempt, CheckpointId(number), "balance", 0)
        handle = writer.write("large", b"x" * 30_000)
        log.append(decision(number, log.attempt))
        log.prune(CheckpointId(number))
        storage.discard([handle])

    complete(0)
    complete(1)
    before = store.requests.copy()
    for number in range(2, 12):
        complete(number)
    cost = store.requests - before
    assert cost == {"PUT": 20, "GET": 10, "LIST": 10, "POST": 20}
