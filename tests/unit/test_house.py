"""`script/house`: the rooms of the code and the imports between them."""

from __future__ import annotations

from pathlib import Path

from tests.support import house


def test_imports_go_down_the_floors() -> None:
    imports = house.count_imports(house.read_modules())
    ranks = {floor: rank for rank, floor in enumerate(house.FLOORS)}
    assert imports["sinks.kafka", "clients.kafka"] > 0  # the links are followed
    upward = [
        (room, imported)
        for room, imported in imports
        if ranks[room.split(".")[0]] > ranks[imported.split(".")[0]]
    ]
    assert upward == []


def test_table_has_a_line_for_each_room_and_one_for_all() -> None:
    modules = house.read_modules()
    rooms = house.measure_rooms(modules)
    lines = list(house.describe_rooms(rooms, house.count_imports(modules)))
    assert len(lines) == len(rooms) + 2
    assert lines[-1].split()[:2] == ["all", str(len(modules))]
    protocol = next(line for line in lines if line.startswith("core.protocol "))
    assert protocol.split("%")[1].split() == ["core"]


def test_lines_of_imports_are_counted_whole(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("import os\nfrom a import (\n    b,\n    c,\n)\n\nx = 1\n")
    assert house.count_import_lines(module) == 5
