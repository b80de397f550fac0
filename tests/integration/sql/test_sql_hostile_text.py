"""Tests that servers' messages with escape sequences and line breaks become harmless lines."""

from __future__ import annotations

import unicodedata

import pytest
from tests.integration.sql.databases import Database

from onceflow.clients.sql.session import DuplicateKey

HOSTILE = "k\x1b[2J\x07\n2026-11-28 ERROR forged"


def test_a_duplicate_key_error_shows_the_key_without_its_control_characters(
    database: Database,
) -> None:
    database.query("CREATE TABLE ledger (id varchar(100) PRIMARY KEY)")
    with database.sink(table="ledger").settings.endpoint.connect("test") as session:
        session.execute(f"INSERT INTO ledger VALUES ('{HOSTILE}')")
        with pytest.raises(DuplicateKey) as refused:
            session.execute(f"INSERT INTO ledger VALUES ('{HOSTILE}')")
    text = str(refused.value)
    assert "forged" in text
    assert [c for c in text if unicodedata.category(c) == "Cc"] == []
