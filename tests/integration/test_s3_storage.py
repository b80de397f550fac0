"""Checkpoint storage on a real S3 server: lost replies, throttling, kills, refused credentials."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.integration.word_proxy import WordProxy
from tests.support.careless_store import CarelessStore
from tests.support.servers.s3 import EmbeddedS3, S3Factory, environment_of
from tests.unit.storage.storage_samples import decision
from typer.testing import CliRunner

from onceflow import ObjectStorage
from onceflow.cli.doctor.storage import check_storage
from onceflow.cli.main import app
from onceflow.core.errors import ConfigError, StorageError
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.storage.filesystems.bucket import BucketFiles
from onceflow.core.storage.filesystems.bucket_settings import (
    PART_BYTES_MIN,
    BucketSettings,
    Patience,
)
from onceflow.core.storage.filesystems.filesystem import AlreadyExists, Created, StorageRefused

WORD = "the-word-that-breaks-the-network"
IMPATIENT = Patience(request_timeout_s=5, retry_timeout_s=2)
PATIENT = Patience(request_timeout_s=10, retry_timeout_s=30)


def _files(url: str, endpoint: str = "", patience: Patience = PATIENT) -> BucketFiles:
    options = {"endpoint": endpoint} if endpoint else {}
    return BucketFiles(BucketSettings(url, options, PART_BYTES_MIN, 4, patience))


def _own(server: EmbeddedS3, monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    """Return a bucket of `server`; the environment leads there."""
    for name, value in {**server.environment, **variables}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.create_bucket('own')}"


@pytest.fixture
def network(onceflow_s3: EmbeddedS3, s3_bucket: str) -> Iterator[WordProxy]:
    """A network before the server that breaks on a word."""
    host, _, port = onceflow_s3.endpoint.removeprefix("http://").partition(":")
    proxy = WordProxy((host, int(port)))
    yield proxy
    proxy.close()


# --- lost messages --------------------------------------------------------------------------------


def test_a_creation_whose_reply_is_lost_is_known_by_what_stands_there(
    network: WordProxy, s3_bucket: str
) -> None:
    files = _files(s3_bucket, f"http://127.0.0.1:{network.port}")
    assert files.read("log/0") is None
    network.lose_reply(WORD)
    mine = f"attempt 1 {WORD}".encode()
    assert files.create_if_absent("log/1", mine) in (Created(), AlreadyExists(mine))
    assert network.resets == 1
    assert _files(s3_bucket).read("log/1") == mine
    # Somebody else's bytes are never taken for one's own.
    network.lose_reply(WORD)
    assert files.create_if_absent("log/1", f"attempt 2 {WORD}".encode()) == AlreadyExists(mine)
    assert _files(s3_bucket).read("log/1") == mine


def test_a_creation_that_never_arrived_is_made_or_known_to_be_unknown(
    network: WordProxy, s3_bucket: str
) -> None:
    files = _files(s3_bucket, f"http://127.0.0.1:{network.port}")
    network.lose_request(WORD)
    mine = f"attempt 1 {WORD}".encode()
    try:
        files.create_if_absent("log/1", mine)
    except StorageError:
        assert files.create_if_absent("log/1", mine) == Created()
    assert network.resets == 1
    assert _files(s3_bucket).read("log/1") == mine


def test_a_decision_whose_reply_is_lost_is_in_the_log_once(
    network: WordProxy, s3_bucket: str
) -> None:
    endpoint = f"http://127.0.0.1:{network.port}"
    storage = ObjectStorage(f"{s3_bucket}/checkpoints", endpoint=endpoint).open("ledger")
    log = storage.log.claim("a driver")
    log.append(decision(0, log.attempt))
    network.lose_reply('"checkpoint":1')
    log.append(decision(1, log.attempt))
    assert network.resets == 1, "the reply to the decision was lost"
    log.append(decision(2, log.attempt))
    assert storage.log.read() == log.view
    assert [one.checkpoint for one in log.view.completed][-1] == CheckpointId(2)
    assert len(storage.log.sequences()) == 4


def test_of_drivers_that_claim_at_once_each_has_an_attempt_of_its_own(s3_bucket: str) -> None:
    storage = ObjectStorage(f"{s3_bucket}/checkpoints")
    attempts: list[int] = []
    start = threading.Barrier(4)

    def claim() -> None:
        job = storage.open("ledger")
        start.wait()
        attempts.append(job.log.claim("a driver").attempt)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    # A number whose claim nobody can tell of is passed over.
    assert len(set(attempts)) == 4


# --- stores that hold the promise, and that do not ------------------------------------------------


def test_a_store_that_cannot_create_if_absent_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, s3_bucket: str
) -> None:
    ObjectStorage(s3_bucket).open("ledger").check_creates()
    with CarelessStore(heeds_conditions=False) as store:
        job = ObjectStorage("s3://careless/x", endpoint=store.endpoint).open("ledger")
        with pytest.raises(ConfigError, match=r"s3://careless/x does not support create-if-absent"):
            job.check_creates()
        store.heeds_conditions = True
        store.objects.clear()
        job.check_creates()
        assert store.objects == {}


def test_a_throttled_store_is_asked_again_until_patience_ends(s3_bucket: str) -> None:
    del s3_bucket  # for its credentials
    with CarelessStore() as store:
        files = _files("s3://busy", store.endpoint)
        store.throttled = 4
        assert files.create_if_absent("log/1", b"mine") == Created()
        assert files.write("state", (b"x" * 100,)) == 100
        assert store.refused == 4
        store.throttled = 10_000
        hurried = _files("s3://busy", store.endpoint, IMPATIENT)
        with pytest.raises(StorageError, match=r"cannot write s3://busy/state.*SlowDown") as busy:
            hurried.write("state", (b"y",))
        assert not isinstance(busy.value, StorageRefused)
        store.throttled = 0
        assert files.read("state") == b"x" * 100


def test_a_server_under_its_own_limit_takes_all_uploads_in_the_end(
    s3_server: S3Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3_server({"max-requests": "1"})
    files = _files(_own(server, monkeypatch))
    paths = [f"state/{number}" for number in range(24)]
    files.for_each(lambda path: files.write(path, (path.encode() * 10_000,)), paths)
    assert len(files.list("state")) == 24


# --- large objects --------------------------------------------------------------------------------


def _chunks(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield number.to_bytes(4, "big") * 65_536


def test_a_large_object_goes_in_parts_and_comes_back_whole(s3_bucket: str) -> None:
    files = _files(s3_bucket)
    assert files.write("large", _chunks(70)) == 70 * 262_144
    pieces = files.read_chunks("large")
    assert pieces is not None
    assert b"".join(pieces) == b"".join(_chunks(70))
    one_by_one = BucketFiles(BucketSettings(s3_bucket, {}, PART_BYTES_MIN, 1, PATIENT))
    begun = one_by_one.read_chunks("large")
    assert begun is not None
    assert len(next(begun)) == 1 << 20
    files.write("large", _chunks(71))  # another one than was begun
    with pytest.raises(StorageError):
        list(begun)


def test_an_upload_whose_source_fails_leaves_neither_object_nor_parts(
    s3_server: S3Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is on its way at that moment may come after the abort: the documents say so."""
    server = s3_server()
    files = _files(_own(server, monkeypatch))

    def list_stored() -> list[Path]:
        return [path for path in server.objects.rglob("*") if path.is_file()]

    def fails() -> Iterator[bytes]:
        yield from _chunks(60)
        deadline = time.monotonic() + 60
        whole_parts = {str(number + 1) for number in range(60 * 262_144 // PART_BYTES_MIN)}
        while whole_parts != {path.name for path in list_stored()}:
            assert time.monotonic() < deadline, list_stored()
            time.sleep(0.01)
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="the source is gone"):
        files.write("state/large", fails())
    assert files.list("state") == ()
    assert list_stored() == [], "parts of an upload that nobody completes are billed for"


def test_a_server_killed_in_mid_upload_shows_nothing_and_the_next_upload_works(
    s3_server: S3Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3_server()
    bucket = _own(server, monkeypatch)

    def dies() -> Iterator[bytes]:
        for number, chunk in enumerate(_chunks(60)):
            if number == 40:
                server.kill()
            yield chunk

    with pytest.raises(StorageError, match=rf"cannot write {bucket}/state/large.*refused"):
        _files(bucket, patience=IMPATIENT).write("state/large", dies())
    server.start()
    files = _files(bucket)
    assert files.read("state/large") is None
    assert files.write("state/large", _chunks(60)) == 60 * 262_144
    assert files.size("state/large") == 60 * 262_144


def test_an_upload_outlives_a_server_that_restarts_within_its_patience(
    s3_server: S3Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3_server()
    files = _files(_own(server, monkeypatch))

    def restarts() -> Iterator[bytes]:
        for number, chunk in enumerate(_chunks(60)):
            if number == 40:
                server.restart()
            yield chunk

    files.write("state/large", restarts())
    assert files.read("state/large") == b"".join(_chunks(60))


# --- credentials ----------------------------------------------------------------------------------


def test_denied_credentials_and_a_missing_bucket_are_refused_by_name(
    s3_server: S3Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3_server()
    bucket = _own(server, monkeypatch)
    with pytest.raises(StorageRefused, match=r"s3://nowhere/x/.*NoSuchBucket.*create the bucket"):
        _files("s3://nowhere/x").create_if_absent("log/1", b"mine")
    with pytest.raises(StorageRefused, match="create the bucket"):
        _files("s3://nowhere/x").read("log/1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret-of-this-store")
    with pytest.raises(
        StorageRefused, match="SignatureDoesNotMatch.*does not belong to the"
    ) as wrong:
        _files(bucket).create_if_absent("log/1", b"mine")
    assert "not-the-secret-of-this-store" not in str(wrong.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(StorageRefused, match=r"InvalidAccessKeyId.*has no such access key"):
        _files(bucket).read("log/1")
    server.create_user("guest", "secret-of-the-guest")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "guest")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-guest")
    with pytest.raises(StorageRefused, match=r"AccessDenied.*right to list, read, write"):
        _files(bucket).write("state", (b"x",))


def test_credentials_revoked_in_mid_upload_are_refused_and_renewed_ones_found_again(
    s3_server: S3Factory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = s3_server()
    bucket = _own(server, monkeypatch)
    key, secret = tmp_path / "key", tmp_path / "secret"

    def issue(number: int) -> None:
        server.create_user(f"user-{number}", f"secret-{number}")
        server.give_bucket("own", f"user-{number}")
        key.write_text(f"user-{number}")
        secret.write_text(f"secret-{number}")

    issue(1)
    options = {"access_key_id": f"${{file:{key}}}", "secret_access_key": f"${{file:{secret}}}"}
    files = BucketFiles(BucketSettings(bucket, options, PART_BYTES_MIN, 4, PATIENT))
    assert files.write("before", (b"x",)) == 1

    def revoked() -> Iterator[bytes]:
        for number, chunk in enumerate(_chunks(60)):
            if number == 40:
                server.delete_user("user-1")
            yield chunk

    with pytest.raises(StorageRefused, match=r"InvalidAccessKeyId|AccessDenied"):
        files.write("state/large", revoked())
    issue(2)
    assert files.write("state/large", _chunks(60)) == 60 * 262_144
    server.delete_user("user-2")
    issue(3)
    assert files.read("before") == b"x", "new credentials are looked up at the first refusal"


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("ExpiredToken", "have expired: renew them"),
        ("RequestTimeTooSkewed", "the clock of this machine differs from the store's"),
        ("QuotaExceeded", "quota is used up"),
    ],
)
def test_what_only_people_can_fix_is_told_with_the_remedy(
    s3_bucket: str, word: str, remedy: str
) -> None:
    del s3_bucket
    with CarelessStore() as store:
        store.refuses_with = word
        with pytest.raises(StorageRefused, match=rf"{word}.*{remedy}"):
            _files("s3://any", store.endpoint).write("state", (b"x",))


def test_no_secret_is_in_a_description_an_error_or_a_pickle(
    onceflow_s3: EmbeddedS3, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"'secret_access_key' holds a secret") as plain:
        ObjectStorage(s3_bucket, options={"secret_access_key": "hunter2-of-the-lake"})
    assert "hunter2" not in str(plain.value)
    monkeypatch.setenv("LAKE_SECRET", os.environ["AWS_SECRET_ACCESS_KEY"])
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    storage = ObjectStorage(
        s3_bucket,
        endpoint=onceflow_s3.endpoint,
        options={"secret_access_key": "${env:LAKE_SECRET}"},
    )
    job = storage.open("ledger")
    job.check_creates()
    kept = pickle.dumps(storage)
    assert os.environ["LAKE_SECRET"].encode() not in kept
    assert pickle.loads(kept) == storage
    assert "LAKE_SECRET" not in repr(storage)
    monkeypatch.setenv("LAKE_SECRET", "another-secret-than-the-stores")
    with pytest.raises(StorageRefused, match="SignatureDoesNotMatch") as refused:
        storage.open("ledger").check_creates()
    assert "another-secret-than-the-stores" not in str(refused.value)


def test_environment_names_what_every_client_reads() -> None:
    assert environment_of("http://x", "k", "s")["AWS_ENDPOINT_URL"] == "http://x"


# --- the doctor -----------------------------------------------------------------------------------


def test_the_doctor_asks_a_bucket_what_checkpoints_will_ask_and_leaves_nothing(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = check_storage(f"{s3_bucket}/checkpoints", ())
    assert "creates if absent in" in str(finding)
    assert _files(s3_bucket).visible_files() == []
    assert _files(s3_bucket).list("checkpoints") == ()
    (missing,) = check_storage("s3://nowhere/checkpoints", ())
    assert "NoSuchBucket" in str(missing)
    with CarelessStore(heeds_conditions=False) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        (careless,) = check_storage("s3://careless/x", ())
    assert "created twice under one name" in str(careless)


def test_what_is_in_doubt_is_listed_by_a_log_in_a_bucket(s3_bucket: str) -> None:
    job = ObjectStorage(f"{s3_bucket}/checkpoints").open("ledger")
    log = job.log.claim("a driver")
    log.append(decision(0, log.attempt))
    rows = job.staging("ledger.out").open()
    rows.write(pa.record_batch({"id": [1, 2, 3]}))
    rows.seal(TransactionId("ledger.out", log.attempt, 1, 0))
    asked = ["txn", "list", "--storage", f"{s3_bucket}/checkpoints", "--json"]
    outcome = CliRunner().invoke(app, asked)
    assert f"ledger.out/{log.attempt}/1/0" in outcome.stdout, outcome
