"""Tests that staged rows name their own table, and that no other text counts as an operation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import StateCorrupt
from onceflow.sinks.sql.write_mode import StagedOperation, StagedVerb, WriteMode


@given(
    st.builds(
        StagedOperation,
        st.builds(TableName, st.none() | st.text(), st.text()),
        st.sampled_from(WriteMode),
        st.lists(st.text()).map(tuple),
        st.sampled_from(StagedVerb),
        st.lists(st.text()).map(tuple),
    )
)
def test_any_operation_comes_back_as_it_was(operation: StagedOperation) -> None:
    assert StagedOperation.from_label(operation.to_label()) == operation


@pytest.mark.parametrize(
    "label",
    ["", "t", "{}", "[2]", '[2, "put", "s", "t"]', '[2, "put", "s", "t", "merge", [], []]'],
)
def test_what_is_no_operation_is_refused(label: str) -> None:
    with pytest.raises(StateCorrupt, match="label"):
        StagedOperation.from_label(label)


@pytest.mark.parametrize(
    "label", ['[3, "put", "s", "t", "insert"]', '[2, "merge", "s", "t", "insert", [], []]']
)
def test_operation_of_another_version_is_left_to_that_version(label: str) -> None:
    with pytest.raises(StateCorrupt, match="another version"):
        StagedOperation.from_label(label)
