"""`script/house`: the rooms of the code and the imports between them."""

from __future__ import annotations

from tests.support.house import (
    FLOORS,
    count_import_lines,
    count_imports,
    describe_rooms,
    measure_rooms,
    read_modules,
)


def test_imports_go_down_the_floors() -> None:
    imports = count_imports(read_modules())
    ranks = {floor: rank for rank, floor in enumerate(FLOORS)}
    assert imports["sinks.kafka", "clients.kafka"] > 0  # the links are followed
    upward = [
        (room, imported)
        for room, imported in imports
        if ranks[room.split(".")[0]] > ranks[imported.split(".")[0]]
    ]
    assert upward == []


def test_table_has_a_line_for_each_room_and_one_for_all() -> None:
    modules = read_modules()
    rooms = measure_rooms(modules)
    lines = list(describe_rooms(rooms, count_imports(modules)))
    assert len(lines) == len(rooms) + 2
    assert lines[-1].split()[:2] == ["all", str(len(modules))]
    protocol = next(line for line in lines if line.startswith("core.protocol "))
    assert protocol.split("%")[1].split() == ["core"]


def test_lines_of_imports_are_counted_whole() -> None:
    assert count_import_lines("import os\nfrom a import (\n    b,\n    c,\n)\n\nx = 1\n") == 5
