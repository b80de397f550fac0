"""The specification names what the code has, and each of its mistakes is tried."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

from tests.specification.worlds import MODEL, WORLDS, read_mistakes

ROOT = Path(__file__).resolve().parents[2]


def test_each_name_of_the_specification_exists_in_the_code() -> None:
    names = set(re.findall(r"`([A-Za-z_.]+)`", MODEL.read_text(encoding="utf-8"))) - {"broken"}
    parts = {part for name in names for part in name.split(".")}
    assert len(parts) > 60
    defined = subprocess.run(
        ["git", "grep", "-hoE", r"^ *(class|(async )?def) \w+|^ *\w+: ", "--", "core", "sinks/sql"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    known = set(re.findall(r"\w+", defined)) | {path.stem for path in ROOT.glob("core/**/*.py")}
    assert parts - known == set()


def test_each_mistake_of_the_specification_is_tried_in_a_world_and_read_by_the_model() -> None:
    tried = {mistake for world in WORLDS for mistake in world.mistakes}
    assert tried == read_mistakes().keys()
    used = set(re.findall(r"broken\(([A-Z_]+)\)", MODEL.read_text(encoding="utf-8")))
    assert used == tried


def test_mistakes_of_the_specification_have_numbers_of_their_own() -> None:
    numbers = Counter(mistake.number for mistake in read_mistakes().values())
    assert sorted(numbers) == list(range(1, numbers.total() + 1))
