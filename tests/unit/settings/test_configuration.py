"""Settings from files and the environment: which is stronger, what is refused, what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onceflow import (
    Checkpointing,
    Configuration,
    HeapBackend,
    LocalProcesses,
    Pipeline,
    RocksDBBackend,
)
from onceflow.cli.main import app
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.restart import ExponentialDelay, FailureRate, FixedDelay, NoRestart
from onceflow.core.settings.configuration import variable_of
from onceflow.core.settings.known_settings import OPTIONS, Kind, size_text
from onceflow.core.settings.pipeline_settings import RuntimeSettings
from onceflow.core.storage import FileSystemStorage, ObjectStorage

FLINK = """
parallelism.default = 4
pipeline.max-parallelism = 64

[execution.checkpointing]
interval = "5 s"
min-pause = "500 ms"
timeout = "2 min"
tolerable-failed-checkpoints = 3
unaligned.enabled = true
aligned-checkpoint-timeout = "10s"

[state]
backend.type = "EmbeddedRocksDB"
backend.incremental = false
checkpoints.dir = "/mnt/checkpoints"
checkpoints.num-retained = 2
savepoints.dir = "/mnt/savepoints"
backend.rocksdb.block.cache-size = "128mb"

[restart-strategy]
type = "failure-rate"
failure-rate.max-failures-per-interval = 5
failure-rate.failure-rate-interval = "1 min"
"""


def loaded(
    tmp_path: Path, text: str = "", environment: dict[str, str] | None = None
) -> Configuration:
    file = tmp_path / "flow.toml"
    file.write_text(text)
    return Configuration.load(file, environment=environment or {})


def test_a_file_of_flinks_names_sets_our_fields(tmp_path: Path) -> None:
    config = loaded(tmp_path, FLINK)
    assert config.parallelism(None) == 4
    assert config.max_parallelism(None) == 64
    assert config.checkpointing(None) == Checkpointing(
        storage=FileSystemStorage("/mnt/checkpoints"),
        interval=5.0,
        min_pause=0.5,
        timeout=120.0,
        tolerable_failures=3,
        retained=2,
        unaligned=True,
        aligned_checkpoint_timeout=10.0,
        savepoints="/mnt/savepoints",
    )
    assert config.state_backend(None) == RocksDBBackend(
        incremental=False, block_cache_bytes=128 << 20
    )
    assert config.restart(None) == FailureRate(failures=5, interval_s=60.0)


def test_the_program_is_stronger_than_the_file_and_the_file_than_the_environment(
    tmp_path: Path,
) -> None:
    config = loaded(
        tmp_path,
        'checkpointing.interval = "5 s"\ncheckpointing.timeout = "1 min"',
        {
            variable_of("checkpointing.timeout"): "3 min",
            variable_of("execution.checkpointing.min-pause"): "2 s",
            variable_of("checkpointing.storage"): "/elsewhere",
        },
    )
    # The interval is what it is by default, and yet the program has said it.
    found = config.checkpointing(Checkpointing("/here", interval="10 s"))
    assert (found.interval, found.timeout, found.min_pause) == ("10 s", 60.0, 2.0)
    assert found.storage == FileSystemStorage("/here")
    assert config.checkpointing(None).storage == FileSystemStorage("/elsewhere")
    settings = loaded(tmp_path, "runtime.channel_batches = 3\nruntime.stop_on_signals = false")
    given = RuntimeSettings(channel_batches=8)
    assert settings.runtime_settings(given) == RuntimeSettings(
        channel_batches=8, stop_on_signals=False
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('execution.checkpointing.intervall = "5 s"', "mean 'execution.checkpointing.interval'"),
        ('checkpointing.intreval = "5 s"', "did you mean 'checkpointing.interval'"),
        ('checkpointing.interval = "5 sek"', "did you mean '5 sec'"),
        ('checkpointing.interval = "5"', "no unit; write '5 s'"),
        ("execution.checkpointing.interval = 5000", "Flink would read milliseconds"),
        ('storage.inline_threshold = "20 kbb"', "the unit 'kbb' is unknown; did you mean 'kb'"),
        ('state.backend.type = "rocksbd"', "did you mean 'rocksdb'"),
        ('restart-strategy.type = "fixed-dleay"', "did you mean 'fixed-delay'"),
        ('checkpointing.mode = "exactly_twice"', "did you mean 'exactly_once'"),
        ('checkpointing.unaligned = "yes"', "is not true or false"),
        ("checkpointing.retained = 1.5", "is not a whole number"),
        ("checkpointing.retained = 0", "retained=0"),
        ("pipeline = 4", "'pipeline' is not a setting"),
        ("= 4", "is not TOML"),
        (
            'checkpointing.interval = "1 s"\nexecution.checkpointing.interval = "2 s"',
            "are one setting; set it once",
        ),
        (
            "checkpointing.unaligned = true\ncheckpointing.max_concurrent = 2",
            r"max_concurrent=1: checkpointing.max_concurrent=2 \(file .*flow.toml\)",
        ),
        ("endpoint.certificate = '/c.pem'", "set all three of"),
        ('state_backend.type = "rocksdb"\nstate_backend.block_cache = "1 kb"', "65536 or more"),
    ],
)
def test_a_mistake_is_named_with_the_file_and_the_nearest_that_would_do(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        loaded(tmp_path, text).check()
    assert "flow.toml" in str(raised.value)


def test_a_mistaken_variable_is_refused_and_those_of_others_are_left_alone(tmp_path: Path) -> None:
    for variable in ("ONCEFLOW_CHECKPOINTING_INTREVAL", "ONCEFLOW_CHEKPOINTING_INTERVAL"):
        with pytest.raises(ConfigError, match="did you mean ONCEFLOW_CHECKPOINTING_INTERVAL"):
            loaded(tmp_path, "", {variable: "5 s"})
    others = "STORAGE TXN_URL DOCTOR_URL CACHE CRASH_POINTS TEST_SERVERS MYSQLD PG_PASSWORD"
    loaded(tmp_path, "", {f"ONCEFLOW_{name}": "x" for name in others.split()})


@pytest.mark.parametrize(
    ("name", "backend", "hint"),
    [
        ("HashMap", HeapBackend, "our 'heap'"),
        ("hashmap", HeapBackend, "our 'heap'"),
        ("EmbeddedRocksDB", RocksDBBackend, "our 'rocksdb'"),
        ("Memory", HeapBackend, "checkpoints go to checkpointing.storage"),
        ("jobmanager", HeapBackend, "checkpoints go to checkpointing.storage"),
        ("Fs", HeapBackend, "checkpoints go to checkpointing.storage"),
        ("filesystem", HeapBackend, "checkpoints go to checkpointing.storage"),
        ("heap", HeapBackend, ""),
        ("rocksdb", RocksDBBackend, ""),
    ],
)
def test_flinks_names_of_backends_are_taken_with_a_hint(
    tmp_path: Path,
    name: str,
    backend: type,
    hint: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = loaded(tmp_path, f'state.backend.type = "{name}"')
    assert isinstance(config.state_backend(None), backend)
    assert [hint in one for one in config.hints()] == [True] * bool(hint)
    caplog.clear()
    assert isinstance(loaded(tmp_path).state_backend(name), backend)
    assert (hint in caplog.text) if hint else not caplog.text


def test_what_is_set_and_not_used_is_told(tmp_path: Path) -> None:
    config = loaded(
        tmp_path, "state.backend.incremental = true\nrestart-strategy.fixed-delay.attempts = 2"
    )
    incremental, attempts = config.hints()
    assert "incremental=true" in incremental
    assert "is not used: state_backend.type=heap (default)" in incremental
    assert "is not used: restart.strategy=exponential_delay (default)" in attempts


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ('restart-strategy.type = "none"', NoRestart()),
        (
            'restart-strategy.type = "fixed-delay"\nrestart-strategy.fixed-delay.delay = "3 s"',
            FixedDelay(attempts=3, delay_s=3.0),
        ),
        (
            'restart.exponential_delay.max_delay = "1 min"',
            ExponentialDelay(initial_delay_s=0.1, multiplier=2.0, max_delay_s=60.0),
        ),
        (
            'restart.exponential_delay.same_mistakes = "none"',
            ExponentialDelay(
                initial_delay_s=0.1, multiplier=2.0, max_delay_s=5.0, same_mistakes=None
            ),
        ),
    ],
)
def test_restart_strategies_by_name(tmp_path: Path, text: str, strategy: object) -> None:
    assert loaded(tmp_path, text).restart(None) == strategy


def test_a_bucket_takes_its_endpoint_and_threshold_from_the_file(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        'state.checkpoints.dir = "s3://bucket/flow"\ns3.endpoint = "http://minio:9000"\n'
        'execution.checkpointing.data-inline-threshold = "20 kb"',
    )
    assert config.checkpointing(None).storage == ObjectStorage(
        "s3://bucket/flow", endpoint="http://minio:9000", inline_threshold_bytes=20 << 10
    )


def test_storage_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    config = loaded(tmp_path, 'state.checkpoints.dir = "hdfs://namenode/flow"')
    with pytest.raises(ConfigError, match=r"checkpoint storage hdfs://\.\.\. is not supported"):
        config.checkpointing(None)


def test_no_two_settings_share_a_name_or_a_variable_and_each_default_can_be_written(
    tmp_path: Path,
) -> None:
    names = [name for option in OPTIONS for name in (option.name, *option.flink)]
    assert len(set(names)) == len(names)
    meant = {(variable_of(name), one.name) for one in OPTIONS for name in (one.name, *one.flink)}
    assert len({variable for variable, _ in meant}) == len(meant)
    for option in OPTIONS:
        written = option.to_text(option.default)
        if option.default is not None and option.kind is not Kind.SIZE:
            assert option.parse(written, option.name) == option.default, option.name
    assert [size_text(size) for size in (20_000, 20 << 10, 3 << 30)] == ["20000 b", "20 kb", "3 gb"]
    # What the table does not set, the file's own words say as the default does.
    assert loaded(tmp_path).restart(None) == Configuration.load(environment={}).restart(None)


def test_a_pipeline_without_storage_says_who_may_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONCEFLOW_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=r"Checkpointing\(storage=.*ONCEFLOW_CHECKPOINTING_STOR"):
        Pipeline(LocalProcesses(), name="ledger")


def test_the_command_prints_each_setting_with_its_origin_default_and_flinks_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "flow.toml"
    file.write_text(FLINK)
    monkeypatch.setenv("ONCEFLOW_RUNTIME_CHANNEL_BATCHES", "4")
    result = CliRunner().invoke(app, ["config", "--file", str(file), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    by_name = {one["name"]: one for one in told["settings"]}
    assert list(by_name) == [option.name for option in OPTIONS]
    assert by_name["checkpointing.interval"] == {
        "name": "checkpointing.interval",
        "value": "5 s",
        "origin": f"file {file}, as execution.checkpointing.interval",
        "default": "10 s",
        "flink": ["execution.checkpointing.interval"],
        "environment": "ONCEFLOW_CHECKPOINTING_INTERVAL",
    }
    channel = by_name["runtime.channel_batches"]
    assert (channel["value"], channel["origin"]) == (
        "4",
        "environment ONCEFLOW_RUNTIME_CHANNEL_BATCHES",
    )
    assert "our 'rocksdb'" in told["hints"][0]
    monkeypatch.setenv("ONCEFLOW_CONFIG", str(file))
    listed = CliRunner().invoke(app, ["config"]).stdout
    line = next(line for line in listed.splitlines() if line.startswith("pipeline.parallelism"))
    assert line.split() == [
        "pipeline.parallelism",
        *("4", "file", f"{file},", "as", "parallelism.default"),
        *("1", "parallelism.default"),
    ]
    file.write_text('checkpointing.intervall = "1 s"')
    refused = CliRunner().invoke(app, ["config"])
    assert refused.exit_code == 2
    assert "did you mean 'checkpointing.interval'" in refused.stderr


FLINK_2 = """
# As Flink 2 delivers it, and what an operator added.
jobmanager:
  bind-host: localhost
  rpc:
    address: localhost
    port: 6123
taskmanager.numberOfTaskSlots: 1
parallelism:
  default: 4
execution:
  checkpointing:
    interval: 180000
    timeout: 2min
    mode: EXACTLY_ONCE
    unaligned: true
    intervall: 3min
state:
  backend:
    type: rocksdb
    incremental: false
    rocksdb.block.cache-size: 128mb
  checkpoints.dir: file:///mnt/checkpoints
cluster.io-pool.size:
blob.fetch.hosts: [a, b]
restart-strategy:
  type: exponential-delay
  exponential-delay:
    initial-backoff: 2 s
rest:
  address: localhost
"""
FLINK_1 = """
jobmanager.rpc.address: localhost
env.java.opts: -Da=b: c   # no YAML, and Flink takes it
parallelism.default: 4
execution.checkpointing.interval: 180000
execution.checkpointing.timeout: 2min
execution.checkpointing.unaligned: true
state.backend: rocksdb
state.backend.incremental: false
state.backend.rocksdb.block.cache-size: 128mb  # of each slot
state.checkpoints.dir: file:///mnt/checkpoints
restart-strategy: exponential-delay
restart-strategy.exponential-delay.initial-backoff: 2 s
a line that Flink skips
"""
LEFT = {
    "config.yaml": {
        "jobmanager.bind-host": 4,
        "jobmanager.rpc.address": 6,
        "jobmanager.rpc.port": 7,
        "taskmanager.numberOfTaskSlots": 8,
        "execution.checkpointing.intervall": 17,
        "blob.fetch.hosts": 25,
        "rest.address": 31,
    },
    "flink-conf.yaml": {"jobmanager.rpc.address": 2, "env.java.opts": 3},
}


@pytest.mark.parametrize(("name", "text"), [("config.yaml", FLINK_2), ("flink-conf.yaml", FLINK_1)])
def test_flinks_own_file_is_read_and_what_has_no_meaning_here_is_listed(
    tmp_path: Path, name: str, text: str
) -> None:
    """Told by `onceflow config`; a duration without unit is in Flink's milliseconds."""
    file = tmp_path / name
    file.write_text(text)
    result = CliRunner().invoke(app, ["config", "--file", str(file), "--json"], env={})
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    values = {one["name"]: one["value"] for one in report["settings"]}
    assert (values["pipeline.parallelism"], values["checkpointing.interval"]) == ("4", "3 min")
    assert (values["checkpointing.timeout"], values["checkpointing.unaligned"]) == ("2 min", "true")
    assert (values["state_backend.type"], values["state_backend.incremental"]) == (
        "rocksdb",
        "false",
    )
    assert values["state_backend.block_cache"] == "128 mb"
    assert values["checkpointing.storage"] == "file:///mnt/checkpoints"
    assert values["restart.exponential_delay.initial_delay"] == "2 s"
    (hint,) = report["hints"]
    places = [f"{left} ({file}:{line}" for left, line in LEFT[name].items()]
    assert [place for place in places if place not in hint] == []
    assert hint.count(f"({file}:") == len(places)


def test_a_setting_of_flinks_file_that_resembles_one_is_listed_with_it(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("execution.checkpointing.intervall: 3min")
    (hint,) = Configuration.load(file, environment={}).hints()
    assert f"({file}:1; execution.checkpointing.interval is known)" in hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("execution:\n  checkpointing.interval: 5 sek", "config.yaml:2.*did you mean '5 sec'"),
        ("checkpointing:\n  intervall: 5 s", "config.yaml:2.*mean 'checkpointing.interval'"),
        ("parallelism.default: [1, 2]", "config.yaml:1.*is not a whole number"),
        ("parallelism.default: 1\nparallelism.default: 2", "config.yaml:2.*are one setting"),
        ("a: b: c", "config.yaml is not YAML: .*line 1"),
        ("- a", "config.yaml:1: expected a table of settings"),
        ("a: &a\n  b: *a", "config.yaml:1: expected a table of settings"),
        ("[a]: b", "config.yaml:1: expected the name of a setting"),
    ],
)
def test_a_mistake_in_flinks_file_is_named_with_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        Configuration.load(file, environment={})
