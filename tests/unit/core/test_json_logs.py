"""A line of the log is one JSON object, whatever it says, with the fields that people filter by."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import SubtaskRef, TransactionId
from onceflow.core.runtime.json_logs import (
    JsonFormatter,
    bind_process_fields,
    bind_thread_fields,
    carry_fields,
    configure_logs,
    configure_slot_logs,
    forget_thread_fields,
    to_slot_settings,
)
from onceflow.core.settings.configuration import Configuration
from onceflow.core.settings.pipeline_settings import Logging

ROOT = Path(__file__).parents[3]
LOGGER = logging.getLogger("onceflow.test")


class Lines:
    """The lines that onceflow's handler has written."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(JsonFormatter())

    def take(self) -> list[dict[str, Any]]:
        text = self._stream.getvalue()
        self._stream.seek(0)
        self._stream.truncate()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def lines() -> Iterator[Lines]:
    written = Lines()
    LOGGER.addHandler(written.handler)
    yield written
    LOGGER.removeHandler(written.handler)
    bind_process_fields()
    forget_thread_fields()


def test_a_line_has_what_is_known_of_process_thread_arguments_and_call(lines: Lines) -> None:
    bind_process_fields(job="ledger", attempt=3, slot=1)
    bind_thread_fields(subtask="in[1]")
    transaction = TransactionId("ledger.out", 3, 41, 1)
    LOGGER.warning("%s of %s waits", transaction, SubtaskRef("out", 2), extra={"sink": "out"})
    (line,) = lines.take()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line.pop("process") > 0
    assert line == {
        "level": "warning",
        "logger": "onceflow.test",
        "message": f"{transaction} of out[2] waits",
        "job": "ledger",
        "attempt": 3,
        "slot": 1,
        "subtask": "out[2]",
        "transaction": str(transaction),
        "checkpoint": 41,
        "sink": "out",
        "thread": threading.current_thread().name,
    }


@pytest.mark.parametrize(
    "text",
    ['a "quoted"\nline\r\n\u2028', "half a pair \ud800", "\x00\x85\u2029"],
    ids=["quotes and line ends", "half of a surrogate pair", "control characters"],
)
def test_one_event_is_one_line_whatever_it_says(lines: Lines, text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        # Past the logger: pytest reports what it hears, and cannot report half of a pair.
        arguments = ("refused: %s", (text,), sys.exc_info(), None, {"cause": text})
        lines.handler.handle(LOGGER.makeRecord(LOGGER.name, logging.ERROR, __file__, 1, *arguments))
    (line,) = lines.take()
    assert "Traceback" in line["trace"]
    assert line["message"].startswith("refused: ")


def test_a_thread_that_is_started_carries_the_fields_and_others_do_not(lines: Lines) -> None:
    bind_thread_fields(job="ledger")
    for work in (carry_fields(LOGGER.warning), LOGGER.warning):
        thread = threading.Thread(target=work, args=("beside",))
        thread.start()
        thread.join(30)
    carried, plain = lines.take()
    assert (carried.get("job"), plain.get("job")) == ("ledger", None)


def test_what_is_left_open_stays_as_the_program_has_it() -> None:
    root = logging.getLogger("onceflow")
    before = (list(root.handlers), root.propagate, root.level)
    configure_logs(Logging())
    assert (list(root.handlers), root.propagate, root.level) == before


def test_settings_replace_each_other_and_a_handler_is_added_once() -> None:
    root, single = logging.getLogger("onceflow"), logging.getLogger("onceflow.runtime.lag")
    handlers, propagates, level = list(root.handlers), root.propagate, root.level
    try:
        for name in ("text", "json", "json"):
            configure_logs(Logging(name, "info", "onceflow.runtime.lag=ERROR"))
        (own,) = [handler for handler in root.handlers if handler not in handlers]
        assert isinstance(own.formatter, JsonFormatter)
        assert not root.propagate, "each line once"
        assert (root.level, single.level) == (logging.INFO, logging.ERROR)
    finally:
        root.handlers, root.propagate = handlers, propagates
        root.setLevel(level)
        single.setLevel(logging.NOTSET)


@pytest.mark.parametrize("levels", ["urllib3=debug", "onceflow.runtime", "onceflow.runtime=loud"])
def test_a_level_that_is_none_is_refused_by_name(levels: str) -> None:
    with pytest.raises(ConfigError, match=r"logging\.levels=.*write onceflow\.events=info"):
        Logging(levels=levels)
    variable = {"ONCEFLOW_LOGGING_LEVELS": levels}
    with pytest.raises(ConfigError, match="ONCEFLOW_LOGGING_LEVELS"):
        Configuration.load(environment=variable).check()


def test_settings_are_read_from_the_environment() -> None:
    environment = {"ONCEFLOW_LOGGING_FORMAT": "json", "ONCEFLOW_LOGGING_LEVEL": "debug"}
    assert Configuration.load(environment=environment).logging() == Logging("json", "debug")
    unchanged = {"ONCEFLOW_LOGGING_FORMAT": "unchanged"}
    assert Configuration.load(environment=unchanged).logging() == Logging()


def test_every_logger_is_documented() -> None:
    named = {
        name
        for folder in ("core", "clients", "formats", "sources", "sinks", "connectors")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'getLogger\("(onceflow[\w.]*)"\)', path.read_text("utf-8"))
    }
    page = (ROOT / "docs" / "reference" / "loggers.md").read_text("utf-8")
    section = page.partition("| logger |")[2]
    documented = set(re.findall(r"`(onceflow[\w.]*)`", section.partition("\n\n")[0]))
    assert documented == named


_SLOT = """
import logging
from onceflow.core.runtime.json_logs import bind_process_fields, configure_slot_logs
from onceflow.core.settings.pipeline_settings import Logging
configure_slot_logs(Logging(level="info"))
configure_slot_logs(Logging(level="info"))
bind_process_fields(job="ledger", attempt=3, slot=1)
logging.getLogger("onceflow.runtime.slot").info("it begins")
"""


def test_a_slot_without_handlers_writes_time_level_logger_and_who_it_is_once() -> None:
    written = subprocess.run(
        [sys.executable, "-c", _SLOT], capture_output=True, text=True, check=True, timeout=60
    ).stderr
    line = "INFO onceflow.runtime.slot: job ledger, attempt 3, slot 1: it begins"
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} {line}\n", written)


def test_a_slot_writes_from_the_level_on_that_the_program_has_set() -> None:
    logger = logging.getLogger("onceflow")
    before = logger.level
    try:
        for level, name in ((logging.INFO, "info"), (5, "debug"), (logging.CRITICAL, "error")):
            logger.setLevel(level)
            assert to_slot_settings(Logging()) == Logging(level=name)  # type: ignore[arg-type]
        assert to_slot_settings(Logging(level="debug")) == Logging(level="debug")
    finally:
        logger.setLevel(before)


def test_a_slot_keeps_the_handlers_of_its_process() -> None:
    logger = logging.getLogger("onceflow")
    handlers, root = [*logger.handlers], logging.NullHandler()
    logging.getLogger().addHandler(root)
    try:
        configure_slot_logs(Logging())
        assert logger.handlers == handlers
    finally:
        logging.getLogger().removeHandler(root)
