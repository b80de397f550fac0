"""Small mistakes in the text of a module, each at one place.

A mutant replaces the text of one expression or statement. All other text stays as it is, so the
lines before it keep their numbers. Texts of errors and logs, annotations, decorators, docstrings
and f-strings are left alone: a mistake there changes no row.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SILENT = {"_log", "_logger", "log", "logger", "warnings"}
"""The names of objects whose calls only tell people something."""


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """One mistake: the text between `start` and `end` of the file becomes `text`."""

    file: str
    line: int
    start: int
    end: int
    text: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"

    def apply(self, source: str) -> str:
        """Return the text of the module with the mistake in it."""
        return source[: self.start] + self.text + source[self.end :]


def list_mutants(file: str, source: str) -> Sequence[Mutant]:
    """Return all mutants of a module, in the order of its text."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found)


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self._file = file
        self._source = source
        self.found: list[Mutant] = []
        lines = source.splitlines(keepends=True)
        self._bytes_before = [0]
        for line in lines:
            self._bytes_before.append(self._bytes_before[-1] + len(line.encode()))
        self._encoded = source.encode()

    # --- what is left alone -----------------------------------------------------------------------

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip an f-string."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Take the statement away, and leave its text alone."""
        self._delete(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip an assertion: it holds in every run."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Skip the annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit the body alone: no decorators, annotations or defaults."""
        if node.name in ("__repr__", "__str__"):
            return
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visit the body alone, unless its methods have no bodies."""
        if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            return
        for statement in node.body:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        """Skip imports for type checkers; turn the condition round."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    # --- expressions ------------------------------------------------------------------------------

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for at, operator in enumerate(node.ops):
            other = _COMPARISONS.get(type(operator))
            if other is not None:
                changed = copy.deepcopy(node)
                changed.ops[at] = other()
                self._replace(node, changed)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._replace(node, changed)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, (ast.Add, ast.Sub)) and not _is_text(node):
            changed = copy.deepcopy(node)
            changed.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            self._replace(node, changed)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, ast.Constant(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, ast.Constant(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        if _tells_people(node):
            return
        if isinstance(node.func, ast.Name) and node.func.id == "zip":
            # `strict` is an assertion: the lengths agree in every run.
            for argument in node.args:
                self.visit(argument)
            return
        if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
            changed = copy.deepcopy(node)
            changed.func = ast.Name(_CALLS[node.func.id])
            self._replace(node, changed)
        self.generic_visit(node)

    # --- statements -------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not _tells_people(node.value):
            self._delete(node)
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._delete(node)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._delete(node)
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        if not all(isinstance(target, ast.Name) for target in node.targets):
            self._delete(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._put(node, "break", "continue -> break")

    def visit_Break(self, node: ast.Break) -> None:
        self._put(node, "continue", "break -> continue")

    # --- how a mutant is noted --------------------------------------------------------------------

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, (ast.Compare, ast.UnaryOp)):
            self._replace(test, ast.UnaryOp(ast.Not(), test))

    def _replace(self, node: ast.expr, changed: ast.expr) -> None:
        text = ast.unparse(ast.fix_missing_locations(changed))
        self._put(node, f"({text})", f"{ast.unparse(node)} -> {text}")

    def _delete(self, node: ast.stmt) -> None:
        self._put(node, "pass", f"without {ast.unparse(node)}")

    def _put(self, node: ast.expr | ast.stmt, text: str, what: str) -> None:
        start, end = self._at(node.lineno, node.col_offset), self._end(node)
        short = what if len(what) <= 160 else f"{what[:157]}..."
        self.found.append(Mutant(self._file, node.lineno, start, end, text, short))

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column_bytes: int) -> int:
        """Return where a place of the syntax tree is in the text: it counts bytes of a line."""
        return len(self._encoded[: self._bytes_before[line - 1] + column_bytes].decode())


def _tells_people(call: ast.Call) -> bool:
    """Return True for a call of a logger, or for one that only tests look at: a crash point."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "reach"
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id in _SILENT
    )


def _is_text(node: ast.BinOp) -> bool:
    """Return True for a concatenation of which a part is a literal text."""
    parts: Iterator[ast.expr] = iter((node.left, node.right))
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, (str, bytes)))
        for part in parts
    )
