"""The translation of keyed functions by record to the text of a kernel.

The kind of each expression is known, and a variable has one kind in the whole function: a kernel
never converts an integer to a float unless Python does. Unsupported code is refused with its line
and the reason, so all translated code has Python's meaning:

    integers        raise ArithmeticError if they exceed 64 bits; see `arithmetic`
    a null          is not supported: a batch with a null in a column that is read runs as Python
    `raise`         ends the kernel, and Python raises the exception when the batch runs again
    variables       must be bound on each path to their use, or the function is refused

If a result column is the same input column in each returned record, it is not computed, so it may
have any type.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import pyarrow as pa

from onceflow.core.compiled.definitions import OpeningStates, RecordedState, read_definition
from onceflow.core.errors import ConfigError
from onceflow.core.plan.compiled_function import (
    BOOLEAN,
    FLOAT,
    INTEGER,
    CompiledFunction,
    Kind,
    OutputColumn,
    StateColumn,
    kind_of_type,
    kind_of_value,
)
from onceflow.core.plan.functions import KeyedFunction

Code: TypeAlias = tuple[str, Kind]
"""An expression of the kernel, and the kind of its values."""

_INTEGER_HELPERS: Mapping[type[ast.operator], str] = {
    ast.Add: "add_integers",
    ast.Sub: "subtract_integers",
    ast.Mult: "multiply_integers",
    ast.Div: "divide_integers",
    ast.FloorDiv: "floor_divide_integers",
    ast.Mod: "modulo_integers",
}
_FLOAT_HELPERS: Mapping[type[ast.operator], str] = {
    ast.Div: "divide_floats",
    ast.FloorDiv: "floor_divide_floats",
    ast.Mod: "modulo_floats",
}
_FLOAT_SIGNS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_BIT_SIGNS: Mapping[type[ast.operator], str] = {ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"}
_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_FLOATS_BY_NAME = {"inf": "math.inf", "-inf": "(-math.inf)", "nan": "math.nan"}
_UNKNOWN = object()

_FUNCTIONS: tuple[tuple[Callable[..., Any], Kind, str, Kind], ...] = (
    (abs, INTEGER, "absolute_integer({})", INTEGER),
    (abs, FLOAT, "abs({})", FLOAT),
    (int, INTEGER, "{}", INTEGER),
    (int, FLOAT, "truncate_float({})", INTEGER),
    (int, BOOLEAN, "(1 if {} else 0)", INTEGER),
    (float, INTEGER, "float({})", FLOAT),
    (float, FLOAT, "{}", FLOAT),
    (bool, INTEGER, "({} != 0)", BOOLEAN),
    (bool, FLOAT, "({} != 0.0)", BOOLEAN),
    (bool, BOOLEAN, "{}", BOOLEAN),
    (math.sqrt, FLOAT, "square_root({})", FLOAT),
    (math.floor, FLOAT, "floor_float({})", INTEGER),
    (math.ceil, FLOAT, "ceil_float({})", INTEGER),
    (math.isnan, FLOAT, "math.isnan({})", BOOLEAN),
    (math.isinf, FLOAT, "math.isinf({})", BOOLEAN),
    (math.isfinite, FLOAT, "math.isfinite({})", BOOLEAN),
)
"""The functions of one argument that may be called: argument's kind, kernel text, result's kind."""


def translate_function(
    function: KeyedFunction, input_schema: pa.Schema, output_schema: pa.Schema
) -> CompiledFunction:
    """Return `function` in the form for slots. Runs `open` on a copy to record its states.

    Raises:
        ConfigError: The function uses code that kernels do not support; names the line and reason.
    """
    # A copy: `open` sets attributes to recorded states, which the user's object must not have.
    opened = copy.copy(function)
    opened.open(cast("Any", OpeningStates(type(function).__name__)))
    return _Translator(opened, input_schema, output_schema).translate()


@dataclass(slots=True)
class _Result:
    """A result in the kernel's text: the index of its line in `_lines`, and its values."""

    index: int
    indent: str
    node: ast.AST
    values: dict[str, ast.expr | str]
    """The source of each column: an expression, or the name of the record's column."""
    codes: dict[str, Code]


class _Translator:
    """Translates one function, statement by statement."""

    def __init__(
        self, function: KeyedFunction, input_schema: pa.Schema, output_schema: pa.Schema
    ) -> None:
        self._input = input_schema
        self._output = output_schema
        self._function = function
        self._name = f"{type(function).__name__}.process"
        self._process, self._definition = read_definition(type(function).process, self._name)
        arguments = self._definition.args
        count = len(arguments.args) + len(arguments.kwonlyargs) + len(arguments.posonlyargs)
        # Defaults are refused, because they would be another source of values.
        if count != 2 or len(arguments.args) != 2 or arguments.vararg or arguments.kwarg:
            raise self._refusal(self._definition, "it must have the parameters self and record")
        self._self, self._record = (argument.arg for argument in arguments.args)
        self._is_generator = inspect.isgeneratorfunction(self._process)
        self._assigned_columns = {
            name
            for node in ast.walk(self._definition)
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            if (name := self._match_column(node)) is not None
        }
        self._kinds: dict[str, Kind] = {}
        """The kinds of variables, and of the record's columns by `_column_variable`."""
        self._bound: set[str] = set()
        self._columns: dict[str, Kind] = {}
        self._constants: dict[str, Kind] = {}
        self._states: dict[str, StateColumn] = {}
        self._lines: list[str] = []
        self._results: list[_Result] = []
        self._results_on_path = 0

    def translate(self) -> CompiledFunction:
        """Translate the whole function."""
        # Loaded before the first statement, for paths on which a column is not assigned.
        for name in sorted(self._assigned_columns.intersection(self._input.names)):
            self._load_column(name, self._definition)
        self._block(self._definition.body, "        ")
        outputs = self._finish_results()
        if not self._lines:
            self._lines.append("        pass")
        return CompiledFunction(
            self._name,
            self._kernel_text(outputs),
            tuple(self._columns.items()),
            tuple(self._constants.items()),
            tuple(self._states.values()),
            outputs,
            self._results_on_path,
        )

    def _kernel_text(self, outputs: tuple[OutputColumn, ...]) -> str:
        columns = [f"column_{index}" for index in range(len(self._columns))]
        constants = [f"constant_{index}" for index in range(len(self._constants))]
        states: list[str] = []
        for index in range(len(self._states)):
            states += [f"state_{index}", f"has_{index}"]
        computed = [f"output_{i}" for i, output in enumerate(outputs) if output.passed_on is None]
        parameters = ["rows", "keys", *columns, *constants, *states, "result_rows", *computed]
        head = [
            f"def kernel({', '.join(parameters)}):",
            "    results = 0",
            "    for row in range(rows):",
            "        key = keys[row]",
        ]
        for index, name in enumerate(self._columns):
            head.append(f"        {self._column_variable(name)} = column_{index}[row]")
        return "\n".join([*head, *self._lines, "    return results", ""])

    # --- statements -------------------------------------------------------------------------------

    def _block(self, statements: list[ast.stmt], indent: str) -> bool:
        """Translate statements. Return True if the code after them is reachable."""
        return all(self._statement(statement, indent) for statement in statements)

    def _statement(self, node: ast.stmt, indent: str) -> bool:  # noqa: C901 - dispatches
        match node:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target, value=ast.expr()):
                assert node.value is not None
                self._assign(target, self._expression(node.value), indent)
            case ast.AugAssign():
                # `x += y` reads x first: in an expression the same node must be a load.
                before = copy.copy(node.target)
                before.ctx = ast.Load()
                value = ast.copy_location(ast.BinOp(before, node.op, node.value), node)
                self._assign(node.target, self._expression(value), indent)
            case ast.If():
                return self._branch(node, indent)
            case ast.Return():
                self._return(node, indent)
                return False
            case ast.Raise():
                self._lines.append(f"{indent}raise ArithmeticError")
                return False
            case ast.Assert():
                self._lines.append(f"{indent}if not {self._test(node.test)}:")
                self._lines.append(f"{indent}    raise ArithmeticError")
            case ast.Expr(value=ast.Yield(value=value)):
                self._add_result(node, value, indent)
            case ast.Expr(value=ast.Call() as call):
                self._change_state(call, indent)
            case ast.For() | ast.While():
                raise self._refusal(node, "loops are not compiled")
            case _:
                raise self._refusal(node, f"{_words(node)} is not compiled")
        return True

    def _branch(self, node: ast.If, indent: str) -> bool:
        self._lines.append(f"{indent}if {self._test(node.test)}:")
        bound, results = set(self._bound), self._results_on_path
        ends: list[tuple[bool, set[str]]] = []
        most = results
        # Each branch starts with only the variables that were bound before the `if`.
        for statements in (node.body, node.orelse):
            self._bound, self._results_on_path = set(bound), results
            start = len(self._lines)
            goes_on = self._block(statements, indent + "    ")
            if len(self._lines) == start:
                self._lines.append(f"{indent}    pass")
            if statements is node.body:
                self._lines.append(f"{indent}else:")
            ends.append((goes_on, self._bound))
            most = max(most, self._results_on_path)
        self._results_on_path = most
        reached = [names for goes_on, names in ends if goes_on]
        # A variable is bound if all branches bind it, except for branches that return.
        self._bound = set[str].intersection(*reached) if reached else bound
        return bool(reached)

    def _assign(self, target: ast.expr, code: Code, indent: str) -> None:
        if isinstance(target, ast.Name) and target.id not in (self._self, self._record):
            variable = f"v_{target.id}"
        elif (name := self._match_column(target)) is not None:
            variable = self._column_variable(name)
        elif self._match_attribute(target) is not None:
            raise self._refusal(target, "a kernel changes no attribute: keep it in a value state")
        else:
            raise self._refusal(
                target, "a value can be assigned to a variable or a column of the record"
            )
        text, kind = code
        # One kind for the whole function, because a variable of compiled code has one machine type.
        before = self._kinds.setdefault(variable, kind)
        if before != kind:
            raise self._refusal(
                target, f"it was {_article(before)} before, and is {_article(kind)} here"
            )
        self._bound.add(variable)
        self._lines.append(f"{indent}{variable} = {text}")

    def _change_state(self, call: ast.Call, indent: str) -> None:
        """Translate `self.state.set(…)` or `self.state.clear()`."""
        state, method = self._state_call(call)
        if state is None or method not in ("set", "clear"):
            raise self._refusal(
                call, "of calls that return nothing only set() and clear() of a state are"
            )
        index = list(self._states).index(state.attribute)
        if method == "clear" and not call.args and not call.keywords:
            # The next read of this key in the batch gets the default from the array.
            default = f"default_{index}"
            self._lines.append(f"{indent}state_{index}[key] = {self._constant(default, state)}")
            self._lines.append(f"{indent}has_{index}[key] = False")
            return
        if method == "clear" or len(call.args) != 1 or call.keywords:
            raise self._refusal(call, f"{method}() has other arguments")
        text, kind = self._expression(call.args[0])
        if kind != state.kind:
            raise self._refusal(
                call,
                f"state {state.descriptor.name!r} holds {_article(state.kind)}, and is set to"
                f" {_article(kind)}",
            )
        self._lines.append(f"{indent}state_{index}[key] = {text}")
        self._lines.append(f"{indent}has_{index}[key] = True")

    def _constant(self, name: str, state: StateColumn) -> str:
        """Return the argument that holds the default of `state`."""
        key = f"={state.attribute}"
        self._constants.setdefault(key, state.kind)
        return f"constant_{list(self._constants).index(key)}"

    # --- results ----------------------------------------------------------------------------------

    def _return(self, node: ast.Return, indent: str) -> None:
        value = node.value
        if value is not None and self._is_generator:
            raise self._refusal(node, "a function that yields returns no value")
        if isinstance(value, (ast.List, ast.Tuple)):
            for element in value.elts:
                if not isinstance(element, ast.Dict):
                    raise self._refusal(element, "each of several records is written as {…}")
                self._add_result(element, element, indent)
        elif value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            self._add_result(node, value, indent)
        # The kernel loops over the rows of a batch, so a return ends the row and not the loop.
        self._lines.append(f"{indent}continue")

    def _add_result(self, node: ast.AST, record: ast.expr | None, indent: str) -> None:
        """Translate one record of the results."""
        values: dict[str, ast.expr | str] = {}
        if isinstance(record, ast.Name) and record.id == self._record:
            values |= self._record_columns()
        elif isinstance(record, ast.Dict):
            for key, element in zip(record.keys, record.values, strict=True):
                if key is None and isinstance(element, ast.Name) and element.id == self._record:
                    values |= self._record_columns()
                elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                    name = self._match_column(element)
                    values[key.value] = element if name is None else name
                else:
                    raise self._refusal(element, "the name of a column is written as text")
        else:
            raise self._refusal(node, f"a result is {self._record} or is written as {{…}}")
        if sorted(values) != sorted(self._output.names):
            raise self._refusal(
                node,
                f"the record has the columns {', '.join(values)}, and the schema says"
                f" {', '.join(self._output.names)}",
            )
        codes = {
            name: self._expression(val) for name, val in values.items() if not isinstance(val, str)
        }
        for value in values.values():
            if isinstance(value, str):
                self._require_column(value, node)
        self._results_on_path += 1
        # Filled once all results are known, because only then the columns to pass on are known.
        self._lines.append("")
        self._results.append(_Result(len(self._lines) - 1, indent, node, values, codes))

    def _record_columns(self) -> dict[str, ast.expr | str]:
        added = [
            name
            for name in self._output.names
            if name not in self._input.names and self._column_variable(name) in self._bound
        ]
        return {name: name for name in (*self._input.names, *added)}

    def _finish_results(self) -> tuple[OutputColumn, ...]:
        """Store the values of all results, because the computed columns are known now."""
        outputs = tuple(map(self._output_column, self._output))
        for result in self._results:
            texts = [f"{result.indent}result_rows[results] = row"]
            for index, output in enumerate(outputs):
                if output.passed_on is None:
                    text, kind = self._result_code(result, output.name)
                    if kind != output.kind:
                        raise self._refusal(
                            result.node,
                            f"column {output.name!r} is {_article(kind)} here, and"
                            f" {self._output.field(output.name).type} in the schema",
                        )
                    texts.append(f"{result.indent}output_{index}[results] = {text}")
            texts.append(f"{result.indent}results += 1")
            self._lines[result.index] = "\n".join(texts)
        return outputs

    def _output_column(self, field: pa.Field) -> OutputColumn:
        sources = {origin for result in self._results if (origin := result.values[field.name])}
        source = next(iter(sources), None)
        if (
            len(sources) == 1
            and isinstance(source, str)
            and source in self._input.names
            and source not in self._assigned_columns
        ):
            if self._input.field(source).type != field.type:
                raise self._refusal(
                    self._definition,
                    f"column {field.name!r} is {self._input.field(source).type}, and {field.type}"
                    " in the schema",
                )
            return OutputColumn(field.name, source)
        kind = kind_of_type(field.type)
        if kind is None or pa.types.is_float32(field.type):
            raise self._refusal(
                self._definition,
                f"column {field.name!r} is {field.type} in the schema: compute integers, float64,"
                " booleans or timestamps, or pass on the same column of the record everywhere",
            )
        return OutputColumn(field.name, None, kind)

    def _result_code(self, result: _Result, name: str) -> Code:
        value = result.values[name]
        if isinstance(value, str):
            return self._load_column(value, result.node)
        return result.codes[name]

    # --- expressions ------------------------------------------------------------------------------

    def _expression(self, node: ast.expr) -> Code:  # noqa: PLR0911 - dispatches
        match node:
            case ast.Constant():
                return self._number(node, node.value)
            case ast.Name() | ast.Attribute():
                return self._translate_name(node)
            case ast.Subscript():
                return self._load_column(self._require_name(node), node)
            case ast.BinOp():
                return self._operation(node)
            case ast.UnaryOp():
                return self._sign(node)
            case ast.BoolOp():
                return self._and_or(node)
            case ast.Compare():
                return self._comparison(node), BOOLEAN
            case ast.IfExp():
                return self._choice(node)
            case ast.Call():
                return self._call(node)
            case _:
                raise self._refusal(node, f"{_words(node)} is not compiled")

    def _require_name(self, node: ast.Subscript) -> str:
        name = self._match_column(node)
        if name is None:
            raise self._refusal(node, f"only {self._record}['column'] is compiled")
        return name

    def _and_or(self, node: ast.BoolOp) -> Code:
        if any(self._expression(value)[1] != BOOLEAN for value in node.values):
            raise self._refusal(node, "the value of `and` and `or` must be of booleans")
        return self._test(node), BOOLEAN

    def _choice(self, node: ast.IfExp) -> Code:
        (chosen, kind), (other, other_kind) = map(self._expression, (node.body, node.orelse))
        if kind != other_kind:
            raise self._refusal(node, f"it is {_article(kind)} or {_article(other_kind)}")
        return f"({chosen} if {self._test(node.test)} else {other})", kind

    def _test(self, node: ast.expr) -> str:
        """Return an expression for the truth of `node`."""
        if isinstance(node, ast.BoolOp):
            word = " and " if isinstance(node.op, ast.And) else " or "
            return f"({word.join(self._test(value) for value in node.values)})"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return f"(not {self._test(node.operand)})"
        text, kind = self._expression(node)
        if kind == BOOLEAN:
            return text
        if kind not in (INTEGER, FLOAT):
            raise self._refusal(node, "a time is always true")
        return f"({text} != 0)"

    def _number(self, node: ast.expr, value: object) -> Code:
        kind = kind_of_value(value)
        if kind is None:
            what = "an integer beyond 64 bits" if isinstance(value, int) else _article(value)
            raise self._refusal(node, f"{what} is not compiled")
        # repr() returns `inf` and `nan`, which are no names in the kernel.
        if kind == FLOAT and not math.isfinite(cast("float", value)):
            return _FLOATS_BY_NAME[repr(value)], kind
        # In parentheses, so that a negative number can follow any operator.
        return f"({value!r})", kind

    def _translate_name(self, node: ast.Name | ast.Attribute) -> Code:
        """Translate a variable, a number of the function's module, or an attribute of `self`."""
        if isinstance(node, ast.Name) and node.id in self._process.__code__.co_varnames:
            variable = f"v_{node.id}"
            if node.id in (self._self, self._record):
                raise self._refusal(node, f"{node.id} cannot be used as a value")
            return self._bound_variable(variable, node, f"variable {node.id}")
        attribute = self._match_attribute(node)
        if attribute is None:
            value = self._find_global(node)
            if value is _UNKNOWN:
                raise self._refusal(node, "it is neither a variable nor a number of the module")
            return self._number(node, value)
        # Statically, because a property would run the user's code, and may differ in a slot.
        value = inspect.getattr_static(self._function, attribute, _UNKNOWN)
        kind = kind_of_value(value)
        if kind is None:
            text = "a state: call get()" if isinstance(value, RecordedState) else "not a number"
            raise self._refusal(node, f"attribute {attribute} is {text}")
        self._constants.setdefault(attribute, kind)
        return f"constant_{list(self._constants).index(attribute)}", kind

    def _bound_variable(self, variable: str, node: ast.AST, what: str) -> Code:
        if variable not in self._bound:
            raise self._refusal(node, f"{what} has no value on some path to this line")
        return variable, self._kinds[variable]

    def _operation(self, node: ast.BinOp) -> Code:
        (left, kind), (right, other) = self._expression(node.left), self._expression(node.right)
        sign = type(node.op)
        if sign in _BIT_SIGNS and kind == other and kind in (INTEGER, BOOLEAN):
            return f"({left} {_BIT_SIGNS[sign]} {right})", kind
        if {kind, other} <= {INTEGER, FLOAT}:
            if kind == other == INTEGER and sign in _INTEGER_HELPERS:
                result = FLOAT if sign is ast.Div else INTEGER
                return f"{_INTEGER_HELPERS[sign]}({left}, {right})", result
            left, right = _to_float(left, kind), _to_float(right, other)
            if FLOAT in (kind, other) and sign in _FLOAT_SIGNS:
                return f"({left} {_FLOAT_SIGNS[sign]} {right})", FLOAT
            if FLOAT in (kind, other) and sign in _FLOAT_HELPERS:
                return f"{_FLOAT_HELPERS[sign]}({left}, {right})", FLOAT
        raise self._refusal(
            node, f"{sign.__name__} of {_article(kind)} and {_article(other)} is not compiled"
        )

    def _sign(self, node: ast.UnaryOp) -> Code:
        if isinstance(node.op, ast.Not):
            return self._test(node), BOOLEAN
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            value = node.operand.value
            # Folded here, because the lowest 64-bit integer would not fit without its sign.
            if type(value) in (int, float):
                return self._number(node, -cast("float", value))
        text, kind = self._expression(node.operand)
        match node.op, kind:
            case ast.USub(), "int":
                return f"negate_integer({text})", kind
            case ast.USub(), "float":
                return f"(-{text})", kind
            case ast.UAdd(), "int" | "float":
                return text, kind
            case ast.Invert(), "int":
                return f"(~{text})", kind
            case _:
                raise self._refusal(
                    node, f"{type(node.op).__name__} of {_article(kind)} is not compiled"
                )

    def _comparison(self, node: ast.Compare) -> str:
        operands = [self._expression(side) for side in (node.left, *node.comparators)]
        kinds = {kind for _, kind in operands}
        # Python compares an integer with a float exactly; a processor would round the integer.
        if kinds == {INTEGER, FLOAT}:
            operands = [
                (f"exact_float({text})" if kind == INTEGER else text, FLOAT)
                for text, kind in operands
            ]
        elif len(kinds) != 1:
            raise self._refusal(
                node, f"{' and '.join(sorted(map(_article, kinds)))} are not compared"
            )
        text = operands[0][0]
        for operator, (operand, _) in zip(node.ops, operands[1:], strict=True):
            sign = _COMPARISONS.get(type(operator))
            if sign is None:
                raise self._refusal(node, f"{type(operator).__name__} is not compiled")
            text += f" {sign} {operand}"
        return f"({text})"

    def _call(self, node: ast.Call) -> Code:
        state, method = self._state_call(node)
        if state is not None:
            if method != "get" or node.args or node.keywords:
                raise self._refusal(node, f"{method}() of a state has no value, or other arguments")
            return f"state_{list(self._states).index(state.attribute)}[key]", state.kind
        called = self._find_global(node.func)
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise self._refusal(node, "arguments are given by position and one by one")
        if (called is min or called is max) and len(node.args) >= 2:
            return self._extreme(node, "least" if called is min else "greatest")
        if len(node.args) == 1:
            text, kind = self._expression(node.args[0])
            for function, of_kind, template, result in _FUNCTIONS:
                if called is function and kind == of_kind:
                    return template.format(text), result
        raise self._refusal(node, f"{ast.unparse(node.func)}() is not compiled for these arguments")

    def _extreme(self, node: ast.Call, helper: str) -> Code:
        codes = [self._expression(argument) for argument in node.args]
        kinds = {kind for _, kind in codes}
        # The kind of min(True, 2) depends on the values.
        if len(kinds) != 1 or BOOLEAN in kinds:
            raise self._refusal(node, "all arguments must be integers, all floats, or all times")
        text, kind = codes[0]
        for operand, _ in codes[1:]:
            text = f"{helper}({text}, {operand})"
        return text, kind

    # --- names ------------------------------------------------------------------------------------

    def _match_column(self, node: ast.AST) -> str | None:
        """Return the column of `record["column"]`, or None if `node` is something else."""
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(column))):
                return column if name == self._record else None
            case _:
                return None

    def _column_variable(self, name: str) -> str:
        names = [*self._input.names, *self._output.names]
        index = names.index(name) if name in names else sorted(self._assigned_columns).index(name)
        return f"{'c' if name in names else 'd'}_{index}"

    def _require_column(self, name: str, node: ast.AST) -> None:
        if name not in self._input.names:
            if name not in self._assigned_columns:
                raise self._refusal(node, f"the record has no column {name!r}")
            self._bound_variable(self._column_variable(name), node, f"column {name!r}")

    def _load_column(self, name: str, node: ast.AST) -> Code:
        """Return the variable of a column, and mark the column as read."""
        self._require_column(name, node)
        variable = self._column_variable(name)
        if name in self._input.names:
            kind = kind_of_type(self._input.field(name).type)
            if kind is None:
                raise self._refusal(
                    node,
                    f"column {name!r} is {self._input.field(name).type}; only integers, floats,"
                    " booleans and timestamps (s, ms or us, without a zone or in UTC) are computed"
                    " with, and others passed on as they are",
                )
            self._columns[name] = self._kinds[variable] = kind
            self._bound.add(variable)
        return variable, self._kinds[variable]

    def _match_attribute(self, node: ast.AST) -> str | None:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == self._self:
                return attribute
            case _:
                return None

    def _state_call(self, node: ast.Call) -> tuple[StateColumn | None, str]:
        """Return the state and the method that a call uses, or None for other calls."""
        if not isinstance(node.func, ast.Attribute):
            return None, ""
        attribute = self._match_attribute(node.func.value)
        if attribute is None:
            return None, ""
        recorded = inspect.getattr_static(self._function, attribute, None)
        if not isinstance(recorded, RecordedState):
            return None, ""
        for state in self._states.values():
            if state.descriptor.name == recorded.descriptor.name:
                return state, node.func.attr
        state = StateColumn(attribute, recorded.descriptor, recorded.kind)
        self._states[attribute] = state
        return state, node.func.attr

    def _find_global(self, node: ast.expr) -> Any:
        """Return the value of a name, or of a module's attribute, outside of the function."""
        if isinstance(node, ast.Attribute):
            module = self._find_global(node.value)
            is_module = isinstance(module, types.ModuleType)
            return getattr(module, node.attr, _UNKNOWN) if is_module else _UNKNOWN
        if not isinstance(node, ast.Name) or node.id in self._process.__code__.co_varnames:
            return _UNKNOWN
        names = inspect.getclosurevars(self._process)
        for scope in (names.nonlocals, self._process.__globals__, vars(builtins)):
            if node.id in scope:
                return scope[node.id]
        return _UNKNOWN

    def _refusal(self, node: ast.AST, reason: str) -> ConfigError:
        """Return the error with the line and the reason why the function cannot be compiled."""
        line = getattr(node, "lineno", self._process.__code__.co_firstlineno)
        file = self._process.__code__.co_filename
        text = "" if isinstance(node, ast.FunctionDef) else ast.unparse(node).splitlines()[0]
        return ConfigError(
            f"{self._name} cannot be compiled: {file}:{line}: {text:.100}: {reason}. Change that,"
            " or leave compiled=True out, and it runs as Python"
        )


def _to_float(text: str, kind: Kind) -> str:
    return f"float({text})" if kind == INTEGER else text


def _article(kind: object) -> str:
    """Return a kind in words, with an article."""
    words = {INTEGER: "an integer", FLOAT: "a float", BOOLEAN: "a boolean"}
    if isinstance(kind, str):
        return words.get(kind, f"a time ({kind})")
    return f"{kind!r:.40}"


def _words(node: ast.AST) -> str:
    return f"`{ast.unparse(node).splitlines()[0]:.60}` ({type(node).__name__})"
