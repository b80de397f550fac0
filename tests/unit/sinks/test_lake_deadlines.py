"""Lake tables behind a server that takes connections and never answers: named, and in time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from onceflow.core.errors import SinkError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import CommitterContext
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import DeltaSink, IcebergSink
from onceflow.sinks.delta.location import TableLocation
from onceflow.sinks.iceberg import rest_catalog

_SCHEMA = pa.schema([("id", pa.int64())])
_KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Yield the URL of a server whose kernel accepts, and that reads nothing."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=64)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def context(tmp_path: Path) -> CommitterContext:
    staging = FileStagingArea.in_directory(str(tmp_path), "job.lake")
    return CommitterContext("job", "lake", "job.lake", AttemptId(1), "log", staging)


def test_delta_table_whose_storage_never_answers_is_named_in_time(
    silent_server: str, context: CommitterContext
) -> None:
    short = {"timeout": "300ms", "retry_timeout": "500ms", "max_retries": "1"}
    options = {**_KEYS, "AWS_ENDPOINT_URL": silent_server, **short}
    sink = DeltaSink("s3://lake/payments", storage_options=options)
    began_s = time.monotonic()
    with pytest.raises(SinkError, match="Delta table s3://lake/payments cannot be loaded"):
        sink.open(context, _SCHEMA)
    assert time.monotonic() - began_s < 30, "the library by itself waits for three minutes"


def test_requests_to_object_storage_have_deadlines_unless_the_user_has_set_others() -> None:
    assert TableLocation("s3://lake/payments", {"Timeout": "90s"}).resolve_options() == {
        "Timeout": "90s",
        "connect_timeout": "5s",
        "retry_timeout": "30s",
    }
    assert TableLocation("/data/payments", {}).resolve_options() == {}


@pytest.mark.parametrize("named", [{}, {"type": "rest"}])
def test_rest_catalog_that_never_answers_is_named_in_time(
    silent_server: str,
    context: CommitterContext,
    named: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rest_catalog, "ANSWER_S", 0.3)
    sink = IcebergSink("shop.payments", catalog={"uri": silent_server, **named})
    began_s = time.monotonic()
    with pytest.raises(SinkError, match=r"the catalog of Iceberg table shop\.payments.*cannot be"):
        sink.open(context, _SCHEMA)
    assert time.monotonic() - began_s < 30, "the library by itself waits for ever"
