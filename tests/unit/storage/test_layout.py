from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceflow.core.errors import CheckpointCorrupt, ConfigError
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.storage.layout import JobPaths, StateNames, safe_name


def names_of(uid: str) -> StateNames:
    return StateNames(AttemptId(2), CheckpointId(17), uid, 3)


@pytest.mark.parametrize("job", ["", ".", "..", "a/b", ".hidden", "ä", "a b", "x" * 129, "a\n"])
def test_a_job_name_that_is_no_directory_name_is_refused_by_name(job: str) -> None:
    with pytest.raises(ConfigError, match="job name"):
        JobPaths(job)


def test_a_record_is_found_again_by_its_file_name() -> None:
    paths = JobPaths("ledger")
    assert paths.record(12) == "ledger/log/000000000012.json"
    assert paths.sequence_of("000000000012.json") == 12
    assert [paths.sequence_of(n) for n in ("12.json", "pruned", "000000000012.json.bak")] == [
        None,
        None,
        None,
    ]


def test_state_of_a_checkpoint_is_found_by_checkpoint_and_attempt() -> None:
    assert names_of("balance").private("keyed") == "chk-17/a2/balance@3@keyed"
    assert names_of("balance").shareable("000012.sst", "u") == "shared/a2@balance@3@u@000012.sst"
    assert JobPaths.writer_of("a2@balance@3@u@000012.sst") == 2
    assert JobPaths.writer_of("readme.txt") is None
    assert JobPaths.checkpoint_of("chk-17") == 17
    assert JobPaths.checkpoint_of("chk-17.old") is None
    assert JobPaths.attempt_of("a2") == 2


@settings(max_examples=30)
@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_different_uids_and_names_never_share_a_file(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    first, second = (names_of(uid).private(name) for uid, name in (one, other))
    assert (first.lower() == second.lower()) == (one == other)
    assert len(first.split("/")[-1]) < 200


def test_separators_inside_names_do_not_make_two_files_one() -> None:
    assert names_of("a@3@b").private("c") != names_of("a").private("b@3@c")
    assert safe_name("Balance") != safe_name("balance") != safe_name("BALANCE")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../other/log/1", "chk-1/../../x", "chk-1//a"])
def test_a_handle_that_leads_out_of_the_job_is_refused(path: str) -> None:
    with pytest.raises(CheckpointCorrupt, match="leads out of its directory"):
        JobPaths("ledger").in_job(path)
