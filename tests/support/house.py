"""The rooms of the code, with their sizes and the imports between them: `script/house`.

The folders at the top level are read, not the links below src/onceflow, which some tools do not
follow.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("cli", "integration", "connectors", "sources", "sinks", "formats", "clients", "core")
CORE = ("api", "runtime", "compiled", "plan", "settings", "commit", "state", "storage", "spi")
SMALL_LINES = 100


@dataclass(frozen=True)
class Room:
    """A folder of the second level."""

    name: str
    files: int
    lines: int
    small_files: int
    """The number of files with fewer than 100 lines."""
    import_lines: int


def read_modules() -> Mapping[str, Path]:
    """Return the path of every module of the product, by its dotted name without `onceflow`."""
    paths = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    return {_name_of(path.relative_to(ROOT)): path for path in paths}


def _name_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the first two parts of a module's name; the second only if it is a folder."""
    parts = module.split(".")
    return ".".join(parts[:2]) if (ROOT / Path(*parts[:2])).is_dir() else parts[0]


def measure_rooms(modules: Mapping[str, Path]) -> Sequence[Room]:
    """Return all rooms, in the order of the floors."""
    paths_by_room: dict[str, list[Path]] = {}
    for module, path in modules.items():
        paths_by_room.setdefault(room_of(module), []).append(path)
    rooms = [_measure_room(name, paths) for name, paths in paths_by_room.items()]
    return sorted(rooms, key=lambda room: _rank_of(room.name))


def _measure_room(name: str, paths: Sequence[Path]) -> Room:
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in paths]
    small = sum(size < SMALL_LINES for size in sizes)
    return Room(name, len(paths), sum(sizes), small, sum(map(count_import_lines, paths)))


def count_import_lines(path: Path) -> int:
    """Return the number of lines that import statements take."""
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in _find_imports(path))


@cache
def _find_imports(path: Path) -> Sequence[ast.Import | ast.ImportFrom]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def _rank_of(room: str) -> tuple[int, int, str]:
    floor, _, inner = room.partition(".")
    return FLOORS.index(floor), CORE.index(inner) if inner in CORE else len(CORE), room


def count_imports(modules: Mapping[str, Path]) -> Counter[tuple[str, str]]:
    """Return how many modules of one room import something of another, by the two rooms."""
    pairs = {
        (module, room_of(imported))
        for module, path in modules.items()
        for imported in _imported_by(path, modules)
    }
    counted = Counter((room_of(module), room) for module, room in pairs)
    return Counter({pair: count for pair, count in counted.items() if pair[0] != pair[1]})


def _imported_by(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in _find_imports(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onceflow."):
            package = (node.module or "").removeprefix("onceflow.")
            for alias in node.names:
                inner = f"{package}.{alias.name}"
                yield inner if inner in modules else package


def describe_rooms(rooms: Sequence[Room], imports: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """Yield the lines of a table: a room a line, and a line for all of them."""
    yield f"{'room':28}{'files':>7}{'lines':>8}{'<100':>6}{'imports':>9}  imports modules of"
    for room in rooms:
        counts = {to: count for (of, to), count in imports.items() if of == room.name}
        targets = sorted(counts, key=lambda name: -counts[name])
        yield f"{_describe_size(room)}  {', '.join(targets)}"
    columns = zip(*((r.files, r.lines, r.small_files, r.import_lines) for r in rooms), strict=True)
    yield _describe_size(Room("all", *map(sum, columns)))


def _describe_size(room: Room) -> str:
    share = f"{room.import_lines / room.lines:.1%}"
    return f"{room.name:28}{room.files:7}{room.lines:8}{room.small_files:6}{share:>9}"


def main() -> None:
    """Print the rooms as a table, or as JSON."""
    parser = argparse.ArgumentParser(prog="script/house", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    modules = read_modules()
    rooms, imports = measure_rooms(modules), count_imports(modules)
    edges = [{"from": a, "to": b, "modules": n} for (a, b), n in sorted(imports.items())]
    found = {"rooms": [asdict(room) for room in rooms], "imports": edges}
    lines = [json.dumps(found)] if arguments.json else describe_rooms(rooms, imports)
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
