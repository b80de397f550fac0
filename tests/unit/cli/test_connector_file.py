"""Connector files: what they mean, what they refuse, their schema, and every ready example."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.two_outputs import TwoOutputs
from typer.testing import CliRunner

from onceflow import LocalProcesses, Pipeline, Stream, avg, count, count_distinct, desc, last, sum_
from onceflow.cli.main import app
from onceflow.cli.run.cluster import OpenedCluster
from onceflow.cli.run.file.connector_file import ConnectorFile, read_connector_file
from onceflow.cli.run.file.layout import (
    DEAD_LETTERS,
    LookupKeys,
    SinkKeys,
    SourceKeys,
    StepKeys,
    parse_aggregates,
)
from onceflow.cli.run.file.parameters import list_parameters
from onceflow.cli.run.file.schema import make_schema
from onceflow.cli.run.target import load_target
from onceflow.connectors.catalog import LOOKUPS, SINKS, SOURCES
from onceflow.core.api import stream
from onceflow.core.api.stream import KeyedStream
from onceflow.core.arrow.schema_text import schema_of
from onceflow.core.errors import ConfigError
from onceflow.core.plan.graph import GraphBuilder, Operator
from onceflow.core.plan.work import (
    AggregateLastRows,
    Emission,
    JoinLookup,
    KeepTop,
    Order,
    RunAggregates,
    Work,
)
from onceflow.core.settings.configuration_file import parse_toml
from onceflow.core.spi.connector import LookupConnector, SourceConnector
from onceflow.core.spi.lookups import LookupReader, LookupSource
from onceflow.core.spi.options import option
from onceflow.sinks import FileSink, KafkaSink, PostgresSink
from onceflow.sources import KafkaSource

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "connectors").glob("*.toml"))
ADDRESSES = {
    "KAFKA_SERVERS": "localhost:9092",
    "POSTGRES_URL": "postgresql://writer@localhost/bank",
    "MYSQL_URL": "mysql://writer@localhost/bank",
}
PLAIN = """
name = "ledger"
[checkpointing]
storage = "/var/lib/onceflow"
interval = "5 s"
[sources.payments]
connector = "kafka"
bootstrap_servers = "localhost:9092"
topic = "payments"
schema = "id BIGINT NOT NULL, account STRING NOT NULL, amount BIGINT"
[steps.balance]
key_by = "account"
running = { balance = "sum(amount)", n = "count()" }
[sinks.ledger]
url = "postgresql://writer@localhost/bank"
table = "ledger"
"""


@pytest.fixture
def addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ADDRESSES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STORAGE", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("DATA", str(tmp_path))


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """The works that a pipeline gets while a test builds it."""
    added: list[Work] = []
    add = GraphBuilder.add

    def add_and_list(graph: GraphBuilder, work: Work, *args: Any, **kwargs: Any) -> Operator:
        added.append(work)
        return add(graph, work, *args, **kwargs)

    monkeypatch.setattr(GraphBuilder, "add", add_and_list)
    return added


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = make_schema()
    jsonschema: Any = importlib.import_module("jsonschema")
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def read(directory: Path, text: str) -> ConnectorFile:
    (directory / "connector.toml").write_text(text)
    return read_connector_file(directory / "connector.toml")


def build(directory: Path, text: str) -> Pipeline:
    return read(directory, text).build(LocalProcesses())


def changed(old: str, new: str) -> str:
    assert old in PLAIN
    return PLAIN.replace(old, new)


# --- examples ------------------------------------------------------------------------------------


def test_there_are_ten_examples() -> None:
    assert len(EXAMPLES) >= 10


@pytest.mark.usefixtures("addresses")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_and_its_schema_says_so(example: Path, validator: Any) -> None:
    pipeline = read_connector_file(example).build(LocalProcesses())
    assert pipeline.describe().name == example.stem.replace("_", "-")
    assert [error.message for error in validator.iter_errors(parse_toml(example.read_text()))] == []


# --- what they mean ------------------------------------------------------------------------------


def test_options_and_settings_are_those_of_python(tmp_path: Path) -> None:
    text = (
        PLAIN
        + """
write_mode = "upsert"
primary_key = ["account", "n"]
lock_timeout_s = "2 min"
on_bad_row = "dead_letter"
[sinks.ledger.dead_letters]
url = "kafka://localhost:9092/letters"
[sinks.files]
url = "s3://lake/payments"
max_rows_per_file = 1000
storage_options = { key = "flow", secret = "${file:/run/secrets/s3}" }
"""
    )
    plan = build(tmp_path, text).describe()
    source, ledger = plan.sources["payments"], plan.sinks["ledger"]
    assert isinstance(source, KafkaSource)
    assert source.topic == ("payments",)
    assert isinstance(ledger, PostgresSink)
    assert (ledger.write_mode, ledger.primary_key) == ("upsert", ("account", "n"))
    assert ledger.lock_timeout_s == 120.0
    letters, files = plan.sinks["ledger-dead-letters"], plan.sinks["files"]
    assert isinstance(letters, KafkaSink)
    assert (letters.bootstrap_servers, letters.topic) == ("localhost:9092", ("letters",))
    assert isinstance(files, FileSink)
    assert files.storage_options["secret"] == "${file:/run/secrets/s3}"
    settings = {setting.name: setting for setting in plan.settings}
    assert settings["checkpointing.interval"].value == "5 s"
    assert settings["checkpointing.interval"].origin == f"file {tmp_path}/connector.toml"
    by_uid = {operator.uid: operator for operator in plan.graph.operators}
    assert by_uid["ledger"].inputs == ("balance",)
    assert plan.graph.edges[0].key == ("account",)


def test_a_text_may_come_from_the_environment_and_a_secret_stays_a_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TABLE", "payments")
    monkeypatch.setenv("BANK_PASSWORD", "hunter2")
    text = changed('table = "ledger"', 'table = "${env:TABLE}"\npassword = "${env:BANK_PASSWORD}"')
    sink = build(tmp_path, text).describe().sinks["ledger"]
    assert isinstance(sink, PostgresSink)
    assert (sink.table, sink.password) == ("payments", "${env:BANK_PASSWORD}")


def test_spark_is_set_by_its_own_names_and_the_flag_is_stronger(tmp_path: Path) -> None:
    (tmp_path / "connector.toml").write_text(
        PLAIN + '[spark]\nmaster = "local[2]"\nexecutor.memory = "2g"\nui.enabled = false\n'
    )
    target = load_target(str(tmp_path / "connector.toml"))
    assert target.master == "local[2]"
    assert dict(target.spark) == {
        "spark.master": "local[2]",
        "spark.executor.memory": "2g",
        "spark.ui.enabled": "false",
    }
    assert OpenedCluster("local-processes").open() == LocalProcesses()


def test_a_run_on_local_processes_imports_neither_spark_nor_pandas() -> None:
    """Arrow imports pandas, which takes half a second of CPU time, to look at a list of Python."""
    program = """if True:
        import sys
        import onceflow.cli.main
        from onceflow.cli.run.cluster import OpenedCluster
        from onceflow import Checkpointing, LocalProcesses, Pipeline, count
        from onceflow.sources import DatagenSource
        OpenedCluster("local-processes").open()
        checkpointing = Checkpointing(storage="never opened")
        pipeline = Pipeline(LocalProcesses(), name="payments", checkpointing=checkpointing)
        records = pipeline.read(DatagenSource(), uid="read")
        records.key_by("account").running(n=count(), uid="counted")
        print({"pandas", "pyspark"} & set(sys.modules))
    """
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout == "set()\n"


# --- mistakes ------------------------------------------------------------------------------------

MISTAKES: Mapping[str, tuple[str, str]] = {
    "no name": (changed('name = "ledger"', ""), "name must be given"),
    "no such section": (
        changed("[sinks.", "[sink."),
        "'sink' is not a parameter here; did you mean",
    ),
    "no sink": (PLAIN.partition("[sinks")[0], "the table [sinks.NAME] is missing"),
    "option": (
        changed("table =", "tabel ="),
        "sinks.ledger: 'tabel' is not a parameter here; did you",
    ),
    "option left out": (changed('table = "ledger"', ""), "sinks.ledger: table must be given"),
    "setting": (changed("interval =", "intervall ="), "did you mean 'checkpointing.interval'?"),
    "value of a setting": (changed('"5 s"', '"soon"'), "'soon' is not a duration"),
    "connector": (changed('connector = "kafka"', 'connector = "kafak"'), "did you mean 'kafka'?"),
    "no connector": (changed('connector = "kafka"', ""), "connector or url must be given"),
    "scheme": (changed("postgresql://", "postgrsql://"), "did you mean 'postgresql'?"),
    "kind of value": (changed('table = "ledger"', "table = 7"), "table=7 must be text"),
    "choice": (PLAIN + 'write_mode = "upset"', "must be one of insert, upsert, ignore, update"),
    "switch": (PLAIN + 'create = "maybe"', "must be true or false"),
    "count": (PLAIN + "flush_rows = 0", "must be a whole number, 1 or more"),
    "schema": (changed("amount BIGINT", "amount BIGNIT"), "sources.payments: "),
    "input": (
        PLAIN + 'input = "balances"',
        "sinks.ledger.input: 'balances' is not a parameter here",
    ),
    "aggregate": (changed('"sum(amount)"', '"sun(amount)"'), "did you mean sum?"),
    "column": (changed('"sum(amount)"', '"sum(amonut)"'), "no such column"),
    "condition": (
        changed('"sum(amount)"', '"sum(amount) FILTER (WHERE amonut > 5)"'),
        "No field named amonut",
    ),
    "no aggregate": (changed('"sum(amount)"', '"amount"'), "is not an aggregate"),
    "two kinds of step": (changed("running =", 'sql = "SELECT 1"\nrunning ='), "sql and running"),
    "no key": (changed('key_by = "account"', ""), "running needs key_by"),
    "foreign key": (
        changed("running =", 'time = "at"\nrunning ='),
        "time belongs to a step with window",
    ),
    "no rows": (changed("running =", "over ="), "over needs rows"),
    "order": (
        changed("running =", 'deduplicate = "last"\nby = "id DESC"\n#'),
        "takes one column in by, without DESC",
    ),
    "reference": (changed('"payments"', '"${TOPIC}"'), "write ${env:TOPIC}"),
    "variable": (changed('"payments"', '"${env:NO_SUCH_TOPIC}"'), "NO_SUCH_TOPIC is not set"),
    "password": (changed("writer@", "writer:${env:SECRET}@"), 'Write password = "${env:NAME}"'),
    "url and option": (
        PLAIN + '[sinks.topic]\nurl = "kafka://localhost:9092/a"\ntopic = "b"',
        "the url already contains topic",
    ),
    "uid": (changed("[steps.balance]", "[steps.payments]"), "'payments' is used twice"),
    "toml": (PLAIN + "table", "is not TOML"),
}


def test_a_step_may_keep_one_record_of_each_key(tmp_path: Path) -> None:
    steps = PLAIN.replace("running = ", 'deduplicate = "last"\nby = "amount"\n# ')
    graph = build(tmp_path, steps).describe().graph
    assert graph.edges[0].key == ("account",)
    kinds = {operator.uid: operator.kind for operator in graph.operators}
    assert kinds["balance"] == "Deduplicate"
    with pytest.raises(ConfigError, match="by='amonut'"):
        build(tmp_path, steps.replace('"amount"\n#', '"amonut"\n#'))


@pytest.mark.parametrize(
    ("step", "work"),
    [
        (
            'over = { usual = "avg(amount)" }\nrows = 5\nby = ["id DESC", "amount"]\n# ',
            AggregateLastRows(
                ("account",), 5, (desc("id"), Order("amount")), {"usual": avg("amount")}
            ),
        ),
        (
            'top_n = 3\nby = "amount DESC"\nrank = "place"\n# ',
            KeepTop(("account",), 3, (desc("amount"),)),
        ),
    ],
    ids=["over", "top_n"],
)
def test_a_step_may_take_records_of_each_key_by_their_order(
    tmp_path: Path, step: str, work: Work, works: list[Work]
) -> None:
    build(tmp_path, PLAIN.replace("running = ", step))
    assert work in works


LOOKUP = """
[steps.named]
[steps.named.lookup_join]
url = "numbers://here"
on = "id"
how = "left"
ttl = "5 s"
keys_max = 7
password = "${env:BANK}"
"""


@dataclass(frozen=True, kw_only=True)
class Numbers(LookupSource):
    """A table in memory."""

    url: str
    password: str = field(metadata=option("The password", secret=True))

    def describe(self, on: Sequence[str]) -> pa.Schema:
        return schema_of("id BIGINT, name STRING")

    def open(self, on: Sequence[str], name: str) -> LookupReader:
        raise NotImplementedError


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOOKUPS, "_registered", {"numbers": LookupConnector(lookup=Numbers)})


@pytest.mark.usefixtures("numbers")
def test_a_step_may_look_records_up_in_a_table(tmp_path: Path, works: list[Work]) -> None:
    build(tmp_path, PLAIN.replace("[sinks", f"{LOOKUP}[sinks"))
    (work,) = [work for work in works if isinstance(work, JoinLookup)]
    assert work.source == Numbers(url="numbers://here", password="${env:BANK}")
    assert (work.columns.on, work.columns.how, work.ttl_s, work.keys_max) == (("id",), "left", 5, 7)


@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('on = "id"', "", "steps.named.lookup_join: on must be given"),
        ('on = "id"', 'on = "nothing"', "steps.named.lookup_join: .*'nothing'"),
        ('how = "left"', 'how = "outer"', "how='outer' must be one of inner, left"),
        ("password", "pasword", "'pasword' is not a parameter here; did you mean 'password'"),
        ("numbers:", "number:", "did you mean 'numbers'"),
        ('url = "numbers://here"', "", "connector or url must be given"),
        (
            "[steps.named]",
            '[steps.named]\nsql = "SELECT id FROM stream"',
            "sql and lookup_join are",
        ),
        ("[steps.named]", "[steps.named]\nrows = 5", "rows belongs to a step with over"),
    ],
)
def test_a_lookup_that_is_described_wrongly_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, PLAIN.replace("[sinks", f"{LOOKUP.replace(old, new)}[sinks"))


def test_windows_of_a_file_may_have_early_results(tmp_path: Path) -> None:
    window = 'window = { type = "tumbling_event_time", size = "1 min" }\n'
    window += 'early_interval = "0 s"\naggregate = '
    steps = PLAIN.replace("running = ", window).replace("[steps", 'watermarks = "id"\n[steps', 1)
    with pytest.raises(ConfigError, match="early_interval=0.0 must be 1 ms or more"):
        build(tmp_path, steps)
    with pytest.raises(ConfigError, match="early_interval needs key_by"):
        build(tmp_path, steps.replace('key_by = "account"', ""))
    assert build(tmp_path, steps.replace('"0 s"', '"5 s"'))


@pytest.mark.parametrize(
    ("key", "kinds"),
    [("", ["PreAggregateWindows", "MergeWindows"]), ('key_by = "account"', ["AggregateWindows"])],
)
def test_windows_have_a_key_or_none(tmp_path: Path, key: str, kinds: list[str]) -> None:
    window = 'window = { type = "tumbling_event_time", size = "1 min" }\naggregate = '
    steps = PLAIN.replace('key_by = "account"', key).replace("running = ", window)
    graph = (
        build(tmp_path, steps.replace("[steps", 'watermarks = "id"\n[steps', 1)).describe().graph
    )
    made = [operator.kind for operator in graph.operators if "Windows" in operator.kind]
    assert made == kinds


def test_running_aggregates_may_be_emitted_once_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emissions: list[Emission] = []

    def record_emission(key: Any, aggregates: Any, ttl: Any, emit: Emission) -> RunAggregates:
        emissions.append(emit)
        return RunAggregates(key, aggregates, ttl, emit)

    monkeypatch.setattr(stream, "RunAggregates", record_emission)
    build(tmp_path, PLAIN)
    build(tmp_path, PLAIN.replace("running = ", 'emit = "batch"\nrunning = '))
    assert emissions == [Emission.RECORD, Emission.BATCH]
    with pytest.raises(ConfigError, match="batch"):
        build(tmp_path, PLAIN.replace("running = ", 'emit = "bach"\nrunning = '))


def test_an_aggregate_may_have_a_condition_as_in_sql() -> None:
    assert parse_aggregates(
        {
            "n": "count() filter (where (amount + 1) > 5)",
            "s": "sum(amount)FILTER (WHERE state = 'a)')",
            "kinds": "COUNT(DISTINCT state) FILTER (WHERE amount > 5)",
            "others": "count( distinct `state`)",
            "newest": "last(state) filter (where amount > 5)",
        },
        "steps.balance.running",
    ) == {
        "n": count(where="(amount + 1) > 5"),
        "s": sum_("amount", where="state = 'a)'"),
        "kinds": count_distinct("state", where="amount > 5"),
        "others": count_distinct("state"),
        "newest": last("state", where="amount > 5"),
    }


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_its_table_and_the_nearest_name(
    tmp_path: Path, mistake: str
) -> None:
    text, words = MISTAKES[mistake]
    with pytest.raises(ConfigError) as raised:
        build(tmp_path, text)
    assert words in str(raised.value)
    assert "connector.toml" in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN + 'password = ["hunter2"]',
        # An administrator may have put the password into the URL.
        changed("url = ", 'connector = "postgres"\nurl = ["hunter2"]\n# '),
    ],
    ids=["password", "url"],
)
def test_a_secret_is_not_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="(password|url) must be text") as raised:
        build(tmp_path, text)
    assert "hunter2" not in str(raised.value)


def test_a_mistake_is_found_before_spark_starts(tmp_path: Path) -> None:
    (tmp_path / "connector.toml").write_text(changed("table =", "tabel ="))
    result = CliRunner().invoke(app, ["run", str(tmp_path / "connector.toml")])
    assert (result.exit_code, "did you mean 'table'?" in result.stderr) == (2, True)


# --- the schema ----------------------------------------------------------------------------------


def test_the_command_prints_the_schema() -> None:
    result = CliRunner().invoke(app, ["run", "--schema"])
    assert json.loads(result.stdout) == make_schema()


def test_the_schema_has_every_option_of_every_connector() -> None:
    properties = make_schema()["properties"]
    for section, kinds in (
        ("sources", {name: SOURCES.find(name).source for name in ("kafka", "datagen")}),
        ("sinks", {name: SINKS.find(name).sink for name in SINKS.names()}),
    ):
        tables = properties[section]["additionalProperties"]["anyOf"]
        for name, kind in kinds.items():
            (table,) = (
                table for table in tables if name in table["properties"]["connector"]["enum"]
            )
            options = set(inspect.signature(kind).parameters)
            assert options <= table["properties"].keys(), name
            assert table["additionalProperties"] is False


@pytest.mark.parametrize(
    "mistake", ["option", "option left out", "kind of value", "choice", "count"]
)
def test_the_schema_refuses_what_the_command_refuses(mistake: str, validator: Any) -> None:
    assert validator.is_valid(parse_toml(PLAIN))
    assert not validator.is_valid(parse_toml(MISTAKES[mistake][0]))


def test_keys_of_tables_are_arguments_in_python() -> None:
    def names_of(*functions: Any) -> set[str]:
        return {name for function in functions for name in inspect.signature(function).parameters}

    own = {"connector", "input"}
    of_sources = list_parameters(SourceKeys).keys() - own - {"output_watermarks"}
    assert of_sources <= names_of(Pipeline.read) & names_of(Pipeline.read_outputs)
    assert {DEAD_LETTERS} <= names_of(Pipeline.read) & names_of(Stream.write)
    assert list_parameters(SinkKeys).keys() - own <= names_of(Stream.write)
    methods = {"sql", "filter", "key_by"}
    assert all(hasattr(Stream, name) for name in methods)
    of_keys = {"running", "over", "deduplicate", "top_n"}
    assert all(hasattr(KeyedStream, name) for name in of_keys)
    assert list_parameters(LookupKeys).keys() - own <= names_of(Stream.lookup_join)
    steps = list_parameters(StepKeys).keys() - own - methods - of_keys - {"select", "aggregate"}
    keyed = (
        *(KeyedStream.running, KeyedStream.over, KeyedStream.deduplicate),
        *(KeyedStream.top_n, KeyedStream.window),
    )
    assert steps <= names_of(*keyed)


# --- sources with several outputs ----------------------------------------------------------------

SHOP = """
name = "shop"
[checkpointing]
storage = "/var/lib/onceflow"
[sources.shop]
connector = "two-outputs"
output_watermarks = { orders = "at" }
[steps.large]
input = "shop.orders"
filter = "amount > 50"
[sinks.out]
connector = "files"
url = "/data/large"
[sinks.names]
input = "shop.customers"
connector = "files"
url = "/data/customers"
"""


@pytest.fixture
def two_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = SourceConnector(source=TwoOutputs)
    monkeypatch.setattr(SOURCES, "_registered", {"two-outputs": connector})


@pytest.mark.usefixtures("two_outputs")
def test_streams_of_a_source_with_several_outputs_are_named_after_both(tmp_path: Path) -> None:
    plan = build(tmp_path, SHOP).describe()
    assert {operator.uid: operator.streams for operator in plan.graph.operators} == {
        "shop": (),
        "large": ("shop.orders",),
        "out": ("large",),
        "names": ("shop.customers",),
    }


@pytest.mark.usefixtures("two_outputs")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("shop.customers", "shop.customer", "did you mean 'shop.customers'?"),
        ("shop.customers", "shop", "'shop' is not a parameter here"),
        ('input = "shop.orders"', "", "several streams: shop.orders, shop.customers"),
        ("output_watermarks = { orders", "output_watermarks = { parts", "no output 'parts'"),
        ('output_watermarks = { orders = "at" }', 'watermarks = "at"', "write output_watermarks"),
    ],
)
def test_a_wrong_name_of_an_output_is_told_with_the_right_ones(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    assert old in SHOP
    with pytest.raises(ConfigError) as raised:
        build(tmp_path, SHOP.replace(old, new))
    assert words in str(raised.value)
    assert "connector.toml" in str(raised.value)


def test_a_source_with_one_stream_takes_no_watermarks_by_output(tmp_path: Path) -> None:
    text = changed('topic = "payments"', 'topic = "payments"\noutput_watermarks = { a = "at" }')
    with pytest.raises(ConfigError, match=r"sources.payments: .* write watermarks"):
        build(tmp_path, text)
