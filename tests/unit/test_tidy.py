"""House style that no linter checks: sizes, documents, links, layers, errors over processes."""

from __future__ import annotations

import ast
import gc
import importlib
import itertools
import pickle
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from onceflow.core import errors
from onceflow.core.errors import InvariantViolation, OnceflowError

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cli", "clients", "connectors", "core", "formats", "integration", "sinks", "sources")

LINES_MAX = 700
FUNCTION_LINES_MAX = 70
BLOB_SIZE_MAX_BYTES = 256 * 1024

NAMELESS_MODULES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "tools"}

# A decision must not depend on anything but its arguments: no clock, thread, socket or file.
PURE_MODULES = {
    "__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools",
    "hashlib", "heapq", "itertools", "math", "operator", "random", "re", "string", "struct",
    "typing", "typing_extensions",
}  # fmt: skip
# `random.Random` is passed in; the module's own functions draw from hidden global state.
IMPURE_NAMES = {"random": {"Random"}}


@pytest.fixture(autouse=True, scope="module")
def many_trees() -> Iterator[None]:
    """Parsing all there is makes a million objects: looking for garbage takes longer than that."""
    gc.disable()
    yield
    tree.cache_clear()
    statements.cache_clear()
    gc.enable()


@cache
def tracked(suffix: str = "") -> tuple[Path, ...]:
    """Every file under version control, or about to be; links are not followed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    paths = (ROOT / name for name in listing.split("\0") if name.endswith(suffix))
    return tuple(sorted({path for path in paths if path.is_file() and not path.is_symlink()}))


def product_modules() -> Iterator[Path]:
    return (path for path in tracked(".py") if path.relative_to(ROOT).parts[0] in PACKAGES)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def statements(path: Path) -> tuple[ast.stmt, ...]:
    """Every statement, those inside of others too; expressions hold none, and are many."""
    taken: list[ast.stmt] = []
    waiting: list[ast.AST] = [tree(path)]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                waiting.append(child)
            if isinstance(child, ast.stmt):
                taken.append(child)
    return tuple(taken)


def place(path: Path, line: int | None = None) -> str:
    name = path.relative_to(ROOT).as_posix()
    return name if line is None else f"{name}:{line}"


def imports(path: Path) -> Iterator[tuple[int, str, frozenset[str]]]:
    """Line, module and imported names of every import, those inside functions too."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, frozenset()
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module, frozenset(alias.name for alias in node.names)


def test_the_repository_is_seen() -> None:
    """Every rule below would hold of an empty list."""
    assert len(list(product_modules())) > 50
    assert ROOT / "core/protocol/checkpoints/coordinator.py" in tracked(".py")
    assert {path.relative_to(ROOT).parts[0] for path in product_modules()} == set(PACKAGES)


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_module_is_too_long_to_read() -> None:
    assert [place(path) for path in tracked(".py") if length(path) > LINES_MAX] == []


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_no_function_is_too_long_to_read() -> None:
    long = [
        f"{place(path, node.lineno)} {node.name}"
        for path in tracked(".py")
        for node in statements(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and code_lines(node) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_modules_are_named_for_what_they_hold() -> None:
    assert [place(path) for path in tracked(".py") if path.stem in NAMELESS_MODULES] == []


# Python 3.10 writes the names in brackets.
_LAZILY = re.compile(r"\(?__getattr__, __dir__\)? = lazy_names\(")


def imports_lazily(node: ast.stmt) -> bool:
    """True if `node` imports names for type checkers, and otherwise passes them to `lazy_names`."""
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) == "TYPE_CHECKING"
        and all(isinstance(one, ast.ImportFrom) for one in node.body)
        and [_LAZILY.match(ast.unparse(one)) is not None for one in node.orelse] == [True]
    )


def test_packages_only_re_export() -> None:
    """An `__init__` is a docstring, imports (lazy ones too), and the list of what is public."""
    wrong = list[str]()
    for path in product_modules():
        if path.name != "__init__.py":
            continue
        body = tree(path).body
        if not ast.get_docstring(tree(path)):
            wrong.append(f"{place(path)} has no docstring")
        code = [node for node in body[1:] if not isinstance(node, ast.Import | ast.ImportFrom)]
        others = [
            f"{place(path, node.lineno)} does more than re-export"
            for node in code
            if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
            and not imports_lazily(node)
        ]
        re_exports = any(
            isinstance(node, ast.ImportFrom) and node.module != "__future__" for node in body
        )
        if re_exports and not code:
            wrong.append(f"{place(path)} re-exports without __all__")
        wrong += others
    assert wrong == []


PURE_MODULES_OF_CORE = frozenset(
    f"onceflow.core.{name}" for name in ("argument_types", "errors", "invariant", "setting_values")
)


def test_the_protocol_imports_nothing_that_has_effects() -> None:
    """Stricter than the layer check, which must name what it forbids."""
    wrong = list[str]()
    for path in product_modules():
        if not place(path).startswith("core/protocol/"):
            continue
        for line, module, names in imports(path):
            if module.startswith("onceflow.core.protocol") or module in PURE_MODULES_OF_CORE:
                continue
            if {f"{module}.{name}" for name in names} <= PURE_MODULES_OF_CORE:
                continue
            allowed = IMPURE_NAMES.get(module)
            if module.split(".")[0] not in PURE_MODULES or (allowed and not names <= allowed):
                wrong.append(f"{place(path, line)} imports {module}")
    assert wrong == []


def test_imports_are_absolute_and_begin_with_onceflow() -> None:
    """The folders are importable under two names when the root is on sys.path; one is wrong."""
    wrong = [
        f"{place(path, line)} imports {module or '.'}"
        for path in tracked(".py")
        for line, module, _ in imports(path)
        if module.startswith(".") or module.split(".")[0] in PACKAGES
    ]
    assert wrong == []


def test_a_token_is_compared_in_constant_time() -> None:
    """`==` takes longer the more of a guess is right. What answers others uses compare_digest."""
    answers_others = ("core/runtime/driver/", "core/runtime/transport/", "cli/ui/")
    modules = [path for path in product_modules() if place(path).startswith(answers_others)]
    found = [
        place(path, node.lineno)
        for path in modules
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Compare)
        and any(isinstance(sign, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for sign in node.ops)
        and any(map(_is_credential, (node.left, *node.comparators)))
    ]
    assert found == []
    digests = [path for path in modules if "hmac.compare_digest(" in path.read_text("utf-8")]
    assert [place(path) for path in digests] == [
        "core/runtime/driver/web_page.py",
        "core/runtime/transport/credentials.py",
    ]


def _is_credential(node: ast.expr) -> bool:
    names = {getattr(part, "id", "") or getattr(part, "attr", "") for part in ast.walk(node)}
    words = {word for name in names for word in name.lower().strip("_").split("_")}
    return not words.isdisjoint({"token", "authorization", "bearer", "expected", "presented"})


def test_no_match_ignores_what_it_does_not_know() -> None:
    """A member that is added to a union must not be dropped in silence: name it, and assert_never.

    A default over open values (text, classes of others) does something, or returns a value.
    """
    found = [
        place(path, case.pattern.lineno)
        for path in product_modules()
        for match in statements(path)
        if isinstance(match, ast.Match)
        for case in match.cases
        if _takes_anything(case.pattern) and all(map(_does_nothing, case.body))
    ]
    assert found == []


def _takes_anything(pattern: ast.pattern) -> bool:
    return isinstance(pattern, ast.MatchAs) and pattern.pattern is None


def _does_nothing(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Continue() | ast.Break() | ast.Return(None):
            return True
        case ast.Expr(ast.Constant()):
            return True
        case _:
            return False


def test_what_is_left_to_do_names_its_issue() -> None:
    """A note without a number is forgotten; the pattern is split so as not to find itself."""
    loose = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b(?!\(#\d+\))")
    found = [
        place(path, number)
        for path in tracked()
        if path.suffix in {".py", ".pyi", ".md", ".toml", ""}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if loose.search(line)
    ]
    assert found == []


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node.body, f"{prefix}{node.name}.")


def inherits_its_docstring(node: ast.AST) -> bool:
    if isinstance(node, ast.ClassDef):
        return False
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    names = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    return bool(names & {"override", "overload", "setter"})


def test_everything_public_says_what_it_does() -> None:
    silent = list[str]()
    for path in product_modules():
        if not ast.get_docstring(tree(path)):
            silent.append(f"{place(path)} (module)")
        for name, node in public_definitions(tree(path).body):
            assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if not ast.get_docstring(node) and not inherits_its_docstring(node):
                silent.append(f"{place(path, node.lineno)} {name}")
    assert silent == []


def documents() -> tuple[Path, ...]:
    return tracked(".md")


def prose(path: Path) -> str:
    """The document without its fenced code, whose `#` are comments."""
    return re.sub(
        r"^(```|~~~).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as the usual renderers make them."""
    headings = re.findall(r"^#{1,6} +(.+?) *#*$", prose(path), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_every_document_has_one_title() -> None:
    titles = {
        place(path): len(re.findall(r"^# ", prose(path), flags=re.MULTILINE))
        for path in documents()
    }
    assert titles
    assert {name: count for name, count in titles.items() if count != 1} == {}


def test_headings_leave_out_no_level() -> None:
    """The documentation site refuses a document whose headings do."""
    wrong = list[str]()
    for path in documents():
        levels = [len(marks) for marks in re.findall(r"^(#{1,6}) ", prose(path), re.MULTILINE)]
        wrong += [
            f"{place(path)}: H{level} to H{next_level}"
            for level, next_level in itertools.pairwise(levels)
            if next_level > level + 1
        ]
    assert wrong == []


def test_names_in_docstrings_end_with_their_quote() -> None:
    """The documentation site reads them as reStructuredText: no letter may follow a quote."""
    quoted = re.compile(r"(?<!`)`[^`\s]+`[A-Za-z]")
    found = [
        f"{place(path, node.lineno)} {name}: {match.group()}"
        for path in product_modules()
        for name, node in public_definitions(tree(path).body)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for match in quoted.finditer(ast.get_docstring(node) or "")
    ]
    assert found == []


def test_every_decision_has_the_same_form() -> None:
    """A number, a date, a status, and first why, then what was decided."""
    head = re.compile(
        r"# (\d+)\. .+\n\nDate: \d{4}-\d\d-\d\d\. "
        r"Status: (?:accepted|superseded by \[.+\]\(.+\))\.\n\n## Context\n"
    )
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert pages
    wrong = list[str]()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        match = head.match(text)
        if match is None or int(match[1]) != int(page.name[:4]) or "\n## Decision\n" not in text:
            wrong.append(page.name)
    assert wrong == []


def test_links_lead_somewhere() -> None:
    broken = list[str]()
    links = 0
    for path in documents():
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
            if re.match(r"[a-z]+:", target):
                continue
            links += 1
            name, _, anchor = target.partition("#")
            destination = (path.parent / name).resolve() if name else path
            if not destination.exists() or (
                anchor and destination.suffix == ".md" and anchor not in anchors(destination)
            ):
                broken.append(f"{place(path)} -> {target}")
    assert links > 5
    assert broken == []


def test_links_to_modules_name_the_module_to_which_they_lead() -> None:
    links = [
        (path, text.replace("\\", ""), target.partition("#")[0])
        for path in documents()
        for text, target in re.findall(r"\[`?([^\]`]+\.py)`?\]\(([^)\s]+)\)", prose(path))
    ]
    assert len(links) > 50
    assert [
        f"{place(path)}: {text} -> {target}"
        for path, text, target in links
        if not f"/{target}".endswith(f"/{text}")
    ] == []


def test_paths_in_documents_exist() -> None:
    """A path in code quotes may hold a `*`; what is made while running begins with a dot."""
    folders = {path.relative_to(ROOT).parts[0] for path in tracked()}
    missing = [
        f"{place(path)}: {quoted}"
        for path in documents()
        for quoted in re.findall(r"`([\w.*/-]+/[\w.*/-]*)`", prose(path))
        if quoted.split("/")[0] in folders and not any(ROOT.glob(quoted.rstrip("/")))
    ]
    assert missing == []


def test_nothing_depends_on_the_machine_it_was_written_on() -> None:
    """Absolute homes and work trees; the patterns are split so as not to find themselves."""
    machine = re.compile(r"/(?:wor" + r"k|roo" + r"t|hom" + r"e|User" + r"s)/[\w.-]+")
    found = [
        f"{place(path, number)}: {match.group()}"
        for path in tracked()
        if path.suffix in {".py", ".pyi", ".md", ".toml", ".sql", ""}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := machine.search(line)) and "://" not in line[: match.start()]
    ]
    assert found == []


def test_shell_scripts_stop_at_the_first_failure() -> None:
    scripts = [
        path
        for path in tracked()
        if path.suffix in {"", ".sh"}
        and path.read_bytes().startswith((b"#!/usr/bin/env bash", b"#!/bin/"))
    ]
    assert ROOT / "script/test" in scripts
    loose = [place(path) for path in scripts if "\nset -euo pipefail\n" not in path.read_text()]
    assert loose == []
    assert [place(path) for path in scripts if not path.stat().st_mode & 0o100] == []
    for path in scripts:
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_no_large_blob_is_kept() -> None:
    large = [place(path) for path in tracked() if path.stat().st_size > BLOB_SIZE_MAX_BYTES]
    assert large == ["uv.lock"]


def base_names(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Each class of a module, and the names of its bases."""
    for node in statements(path):
        if isinstance(node, ast.ClassDef):
            bases = (ast.unparse(base) for base in node.bases)
            yield node.name, {base.rpartition(".")[2] for base in bases}


@cache
def error_classes() -> tuple[type[BaseException], ...]:
    """Every error of the product, whatever else this process has imported."""
    names, modules = {"OnceflowError", "InvariantViolation"}, set[str]()
    grows = True
    while grows:
        grows = False
        for path in product_modules():
            for name, bases in base_names(path):
                if bases & names and name not in names:
                    names.add(name)
                    modules.add(module_name(path))
                    grows = True
    for module in modules:
        importlib.import_module(module)

    def below(parent: type[BaseException]) -> Iterator[type[BaseException]]:
        yield parent
        for child in parent.__subclasses__():
            yield from below(child)

    found = {error for error in below(OnceflowError) if error.__module__ in modules}
    return (*sorted(found, key=lambda error: error.__name__), OnceflowError, InvariantViolation)


def test_an_error_crosses_a_process_whole() -> None:
    message = "ledger/3/17/0/2: committed 5 of 7 rows; do this"
    assert len(error_classes()) > 50
    for error in error_classes():
        again = pickle.loads(pickle.dumps(error(message)))
        assert type(again) is error
        assert str(again) == message, error
        assert repr(again) == repr(error(message))


def test_every_error_is_listed_and_drawn() -> None:
    listed = set(errors.__all__)
    raised = {error.__name__ for error in error_classes() if error.__module__ == errors.__name__}
    assert raised <= listed
    drawing = errors.__doc__ or ""
    assert [name for name in sorted(listed) if name not in drawing] == []


def test_the_error_tree_tells_whose_fault_and_what_may_be_tried() -> None:
    for error in error_classes():
        if issubclass(error, OnceflowError):
            assert error.domain in {"user", "external", "internal"}, error
            assert error.retry in {"never", "checkpoint", "job"}, error


def module_name(path: Path) -> str:
    parts = ("onceflow", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_import_each_other() -> None:
    """Neither for types alone, nor inside a function."""
    paths = {module_name(path): path for path in product_modules()}
    imports: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in statements(path):
            if isinstance(node, ast.ImportFrom) and node.module in paths:
                imported = {f"{node.module}.{alias.name}" for alias in node.names}
                imports[name] |= (imported & paths.keys()) or {node.module}
        imports[name].discard(name)
    TopologicalSorter(imports).prepare()


def test_decoders_are_made_by_one_thread_at_a_time() -> None:
    """msgspec's look-up of a class is not made for several."""
    made = re.compile(r"msgspec\.(json|msgpack)\.(Decoder\(|decode\([^)]*type=)")
    found = [
        str(path.relative_to(ROOT))
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] in PACKAGES and made.search(path.read_text("utf-8"))
    ]
    assert found == ["core/decoding.py"]
