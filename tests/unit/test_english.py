"""Names and docstrings in plain English: what docs/STYLE.md asks for and a test can hold."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cli", "clients", "connectors", "core", "formats", "integration", "sinks", "sources")

NOT_PARTICIPLES = {"embed", "exceed", "feed", "need", "seed", "speed", "red", "succeed", "proceed"}
IRREGULAR = {
    "begun", "brought", "come", "dealt", "done", "drawn", "fed", "found", "given", "gone", "held",
    "hidden", "kept", "known", "led", "left", "lost", "made", "meant", "met", "paid", "said",
    "seen", "sent", "shown", "spent", "stuck", "taken", "thrown", "told", "written",
}  # fmt: skip

STATES = frozenset[str]()
"""Functions that are participles and say a state all the same, each for a reason."""

NAMES_OF_OTHERS = frozenset({"onQueryStarted", "onQueryTerminated", "onQueryProgress"})
"""What Spark calls."""

FORBIDDEN_IN_NAMES = frozenset(
    {"place", "places", "ghost", "news", "told", "said", "dealt", "come"}
)
FORBIDDEN_VARIABLES = FORBIDDEN_IN_NAMES | {
    "found",
    "it",
    "wanted",
    "here",
    "rest",
    "settled",
    "one",
}
FIELDS_OF_FORMATS = frozenset(
    {
        ("core/runtime/driver/state_lookup.py", "found"),
        ("core/spi/connector.py", "found"),
        ("core/state/api/descriptors.py", "one"),
        ("core/runtime/events/job_events.py", "place"),
        ("core/runtime/events/status.py", "place"),
    }
)
"""Fields of events, of the status and of the endpoint's answers, and an argument of a method
that users write: programs know them by name."""

FORBIDDEN_IN_PROSE = re.compile(
    r"\b(?:ghosts?|at night|hand(?:s|ed|ing)? over|let(?:s|ting)? go|let \w+ go|news|dealt)\b"
)

NO_OPENING = re.compile(
    r"(?:What|Who|Whose|Where|How|Whether|When|Of|As|By|To whom|That which|Never|Give|If"
    r"|While|Once|Only|Safe|Older|Twice|Before|After|In|On|With|For|At|From|So|Not|No|All|Each|One|It"
    r"|And|Or|Those|Both)\b"
)
"""How no docstring begins: with a verb or an article, the first word says what follows."""

NO_NOUN = re.compile(
    r"\AReturn (?:what|how|which|whether|where)\b.*"
    r"|^    \w+: (?:Of|Where|What|Which|Is|Are|How|Whether)\b.*",
    re.MULTILINE,
)
"""A result or an argument that a docstring describes without a noun."""

QUESTION = re.compile(r'(?:\A|:\n)\s*r?"""((?:What|Who|Whose|Whether|How)\b.*)')
"""How no docstring of a function, a class or a module outside of the product begins."""

TWINS = frozenset[str]()
"""Public class names that exist twice, each for a reason."""


@cache
def modules() -> tuple[Path, ...]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PACKAGES],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    paths = {ROOT / name for name in listing.split("\0") if name.endswith(".py")}
    return tuple(sorted(path for path in paths if path.is_file() and not path.is_symlink()))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


@pytest.fixture(autouse=True, scope="module")
def forgotten_trees() -> Iterator[None]:
    """Most of reading a million nodes would be looking for garbage among them."""
    gc.disable()
    yield
    gc.enable()
    nodes.cache_clear()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_clause(path: Path, name: str) -> bool:
    """A clause of the kit has the name of what it holds, which reports show."""
    return name_of(path).startswith("integration/conformance/clauses/") and name[0] != "_"


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}


def is_participle(word: str) -> bool:
    return word in IRREGULAR or (word.endswith("ed") and word not in NOT_PARTICIPLES)


@pytest.mark.only_proof
def test_functions_are_verbs() -> None:
    """A property may be a state."""
    wrong = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in modules()
        for node in functions(path)
        if is_participle(node.name.strip("_").split("_")[0])
        and not decorators(node) & {"property", "cached_property", "setter"}
        and node.name not in STATES | NAMES_OF_OTHERS
        and not is_clause(path, node.name)
    ]
    assert wrong == []


def test_a_check_says_what_it_raises() -> None:
    """ "Return when …" and "Return if …" are no sentences about a check."""
    wrong = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in modules()
        for node in functions(path)
        if re.match(r"Return (?:when|while|if)\b", ast.get_docstring(node) or "")
    ]
    assert wrong == []


def bound_names(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def test_variables_say_what_they_hold() -> None:
    wrong = [
        f"{name_of(path)}:{line} {name}"
        for path in modules()
        for line, name in bound_names(path)
        if name.strip("_") in FORBIDDEN_VARIABLES and (name_of(path), name) not in FIELDS_OF_FORMATS
    ]
    assert wrong == []


def words(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")


def test_functions_and_classes_avoid_words_of_no_meaning() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not FORBIDDEN_IN_NAMES.isdisjoint(words(node.name))
        and not is_clause(path, node.name)
    ]
    assert wrong == []


def test_docstrings_avoid_words_of_no_meaning() -> None:
    wrong = [
        f"{name_of(path)}:{getattr(node, 'lineno', 1)} {match.group()}"
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        for match in FORBIDDEN_IN_PROSE.finditer(ast.get_docstring(node) or "")
    ]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_a_verb_or_an_article(package: str) -> None:
    wrong = [
        f"{name_of(path)}:{getattr(node, 'lineno', 1)} {docstring.splitlines()[0]}"
        for path in modules()
        if name_of(path).startswith(f"{package}/")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        and NO_OPENING.match(docstring := ast.get_docstring(node) or "")
    ]
    assert wrong == []


def test_results_and_arguments_are_nouns() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} {match.group().strip()}"
        for path in modules()
        for node in functions(path)
        for match in NO_NOUN.finditer(ast.get_docstring(node) or "")
    ]
    assert wrong == []


def test_docstrings_of_tests_begin_with_what_they_describe() -> None:
    """Search the texts, because parsing all tests takes seconds. The budget only falls."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "tests/*.py", "benchmarks/*.py", "demo/*.py", "examples/*.py"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    wrong = [
        f"{name}: {match.group(1)}"
        for name in listing.split("\0")
        if name and (ROOT / name).is_file()
        for match in QUESTION.finditer((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert len(wrong) <= 8, wrong


def test_a_public_class_name_exists_once() -> None:
    where = defaultdict[str, list[str]](list)
    for path in modules():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name_of(path))
    twins = {name: paths for name, paths in where.items() if len(paths) > 1 and name not in TWINS}
    assert twins == {}


def test_help_texts_are_sentences() -> None:
    """A help text begins with a capital and ends as a sentence."""
    wrong = [
        f"{name_of(path)}:{node.lineno} {node.value.value}"
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.keyword)
        and node.arg == "help"
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and not re.match(r"[A-Z0-9].*[.)]$", node.value.value, re.DOTALL)
    ]
    assert wrong == []


@pytest.mark.only_proof
def test_only_what_exists_is_excused() -> None:
    """An excuse that nothing needs any more hides the next one."""
    names = {node.name for path in modules() for node in functions(path)}
    assert names >= STATES
    bound = {(name_of(path), name) for path in modules() for _, name in bound_names(path)}
    assert bound >= FIELDS_OF_FORMATS
