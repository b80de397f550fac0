"""Names that tests replace are there, also in tests that the default run leaves out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
_OURS = re.compile(r"(onceflow|tests)(\.|$)")


def test_each_name_that_a_test_replaces_is_in_its_module() -> None:
    """A module may import a whole module in place of a name; then the name is looked up there."""
    wrong = list[str]()
    found = 0
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "setattr(" not in text and "patch.object(" not in text:
            continue
        tree = ast.parse(text)
        modules = dict(_read_modules(tree))
        loops = dict(_read_loops(tree))
        for line, variable, name in _read_patches(tree):
            for alias in loops.get(variable, [variable]):
                if alias in modules:
                    found += 1
                    if not hasattr(import_module(modules[alias]), name):
                        place = f"{path.relative_to(ROOT)}:{line}"
                        wrong.append(f"{place} replaces {modules[alias]}.{name}")
    assert wrong == []
    assert found > 50


def _read_modules(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the alias and the whole name of each module of product or tests that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _OURS.match(node.module or ""):
            package = import_module(node.module or "")
            for alias in node.names:
                if isinstance(getattr(package, alias.name, None), ModuleType) or _is_module(
                    f"{node.module}.{alias.name}"
                ):
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.removeprefix("onceflow.").split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def _read_loops(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield the variable of each loop over names, and the names."""
    for node in ast.walk(tree):
        match node:
            case ast.For(target=ast.Name(variable), iter=ast.Tuple(elements) | ast.List(elements)):
                yield (
                    variable,
                    [element.id for element in elements if isinstance(element, ast.Name)],
                )
            case _:
                pass


def _read_patches(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name of `monkeypatch.setattr(module, "name", …)` and the like."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "object"),
                args=[ast.Name(alias), ast.Constant(str(name)), *_],
            ):
                yield node.lineno, alias, name
            case _:
                pass
