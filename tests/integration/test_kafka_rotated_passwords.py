"""A password that is changed at the broker while a job runs: the job waits for the new one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, cast

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._scram import (
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)
from tests.integration.kafka_feed import produce, record, source
from tests.integration.kafka_sink_kit import ids_in
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    FixedDelay,
    JobEvent,
    JobRestarting,
    JobState,
    JobStatus,
    LocalProcesses,
    Pipeline,
)
from onceflow.integration.conformance.processes import eventually
from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.process import LOOPBACK, free_port
from onceflow.sinks import KafkaSink

pytestmark = pytest.mark.servers


class _ScramAdmin(Protocol):
    def alter_user_scram_credentials(
        self, alterations: list[UserScramCredentialAlteration]
    ) -> Mapping[str, Future[None]]: ...


class _ScramKafka(EmbeddedKafka):
    """A broker with a second listener for users with SCRAM passwords."""

    def __init__(self) -> None:
        super().__init__(
            {
                "sasl.enabled.mechanisms": "SCRAM-SHA-256",
                "listener.name.sasl.scram-sha-256.sasl.jaas.config": (
                    "org.apache.kafka.common.security.scram.ScramLoginModule required;"
                ),
            }
        )
        self.guarded = f"{LOOPBACK}:{free_port()}"
        self._options["listeners"] = (
            f"PLAINTEXT://{self.bootstrap_servers},SASL://{self.guarded},"
            f"CONTROLLER://{LOOPBACK}:{self._controller_port}"
        )
        self._options["listener.security.protocol.map"] = (
            "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL:SASL_PLAINTEXT"
        )

    def set_password(self, user: str, password: str) -> None:
        admin = cast("_ScramAdmin", AdminClient({"bootstrap.servers": self.bootstrap_servers}))
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        upsertion = UserScramCredentialUpsertion(user, info, password.encode())
        for future in admin.alter_user_scram_credentials([upsertion]).values():
            future.result(60)


@pytest.fixture
def broker() -> Iterator[_ScramKafka]:
    with _ScramKafka() as server:
        yield server


def test_a_job_outlasts_a_changed_password_and_goes_on_when_its_file_has_the_new_one(
    broker: _ScramKafka, tmp_path: Path
) -> None:
    broker.set_password("payer", "first-pass")
    secret = tmp_path / "secret"
    secret.write_text("first-pass\n")
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "payer",
        "sasl.password": f"${{file:{secret}}}",
    }
    read, written = (broker.create_topic(name, 2) for name in ("payments", "ledger"))
    for partition in range(2):
        produce(broker.bootstrap_servers, read, map(record, range(50)), partition=partition)
    errors: list[str] = []

    def listen(event: JobEvent, status: JobStatus) -> None:
        if isinstance(event, JobRestarting):
            errors.append(status.last_error)

    pipeline = Pipeline(
        LocalProcesses(),
        name="rotated",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.2),
        restart=FixedDelay(attempts=1000, delay_s=0.2),
        settings=SETTINGS,
        listeners=[listen],
    )
    described = source(broker.guarded, read, options=options, deadline_s=3.0)
    sink = KafkaSink(broker.guarded, topic=written, options=options, deadline_s=3.0)
    pipeline.read(described, uid="payments").write(sink, uid="ledger")
    job = pipeline.start()
    try:
        assert eventually(lambda: len(ids_in(broker.bootstrap_servers, written)) == 100, 60)
        broker.set_password("payer", "second-pass")
        # Connections that were made before keep their login: a broker that is started anew asks
        # for it again.
        broker.kill()
        broker.restart()
        assert eventually(lambda: len(errors) > 2, 120), (errors, job.status())
        assert not job.state.ended, job.status()
        assert "refuses to authenticate user 'payer'" in job.status().last_error
        secret.write_text("second-pass\n")
        for partition in range(2):
            produce(broker.bootstrap_servers, read, map(record, range(50, 60)), partition=partition)
        assert eventually(lambda: len(ids_in(broker.bootstrap_servers, written)) == 120, 120)
        assert job.status().state is JobState.RUNNING
    finally:
        job.cancel()
    assert sorted(ids_in(broker.bootstrap_servers, written)) == sorted([*range(60), *range(60)])
    assert all("-pass" not in error for error in errors)
