"""Options for a client library: passed on under its names, refused with advice, never printed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from onceflow.core.errors import ConfigError
from onceflow.core.spi.options import OptionRules, OptionValue

RULES = OptionRules(
    what="Queue option",
    prefix="queue.",
    owned={"client.name": "it is derived from the job"},
    owner="the job",
    foreign={"trust.store": "give ca.file instead"},
    foreign_client="the other client",
    foreign_files={".box": "a box: export it as PEM"},
    secret_parts=("password", "token"),
)


def test_options_are_text_under_the_client_s_own_names() -> None:
    given: dict[str, OptionValue] = {"queue.depth": 7, "checked": True, "share": 0.5, "mode": "x"}
    assert RULES.accept(given) == {"depth": "7", "checked": "true", "share": "0.5", "mode": "x"}
    assert RULES.accept({"queue.depth": 7, "depth": "7"}) == {"depth": "7"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"client.name": "a"},
            "Queue option 'client.name' is set by the job: it is derived from the job",
        ),
        (
            {"queue.trust.store": "a"},
            "Queue option 'queue.trust.store' is the other client's: give ca.file instead",
        ),
        ({"ca.file": "/x.box"}, "Queue option 'ca.file' names a box: export it as PEM"),
        (
            {"queue.depth": 7, "depth": 8},
            "Queue option 'depth' is given twice, with different values",
        ),
    ],
)
def test_an_option_that_cannot_be_passed_on_is_refused_as_it_was_written(
    options: Mapping[str, OptionValue], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RULES.accept(options)
    assert str(caught.value) == message


def test_a_reference_is_kept_until_it_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_USER", "ann")
    secret = tmp_path / "password"
    secret.write_text("hunter2\n")
    given = {"user": "${env:QUEUE_USER}", "password": f"${{file:{secret}}}"}
    assert RULES.accept(given) == given
    assert RULES.resolve_secrets(given) == {"user": "ann", "password": "hunter2"}
    monkeypatch.delenv("QUEUE_USER")
    with pytest.raises(ConfigError, match=r"^Queue option 'user': .*QUEUE_USER is not set"):
        RULES.resolve_secrets(given)


def test_secrets_are_hidden_by_name_and_in_whatever_the_client_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUEUE_TOKEN", "tok-1")
    given = {"user": "ann", "Login.Password": "hunter2", "token.value": "${env:QUEUE_TOKEN}"}
    hidden = {"user": "ann", "Login.Password": "***", "token.value": "***"}
    assert RULES.printable(given) == hidden
    text = "ann was refused with hunter2 and tok-1"
    assert RULES.without_secrets(text, given) == "ann was refused with *** and ***"
    assert RULES.without_secrets("x", {"password": ""}) == "x"
