"""Random functions of a record, as the text of a module: all that is compiled, in any order."""

from __future__ import annotations

import random

HEAD = """
import math

import pyarrow as pa

from onceflow import KeyedFunction, ValueStateDescriptor

OUTPUT = pa.schema(
    [("key", pa.string()), ("n", pa.int64()), ("k", pa.int32()), ("x", pa.float64()),
     ("f", pa.bool_()), ("t", pa.timestamp("us")), ("u", pa.timestamp("us")), ("note", pa.string())]
)


class Drawn(KeyedFunction):
    whole = 7
    part = -2.5

    def output_schema(self, input_schema):
        return OUTPUT

    def open(self, state):
        self.number = state.value_state(ValueStateDescriptor("number", int, default=3))
        self.share = state.value_state(ValueStateDescriptor("share", float, default=0.5))
        self.seen = state.value_state(ValueStateDescriptor("seen", bool, default=False))

    def process(self, record):
"""

_INTEGERS = ("0", "1", "-1", "2", "7", "-13", "3", "100", "4611686018427387904")
_FLOATS = ("0.0", "-0.0", "1.5", "-2.25", "1e300", "1e-300", "9007199254740993.0")


class FunctionText:
    """Draws the text of one function; the same of the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._variables: dict[str, list[str]] = {"int": [], "float": [], "bool": []}
        self._names = 0
        self.lines: list[str] = []

    def draw(self) -> str:
        """Return the whole module."""
        self._block("        ", depth=0)
        self._yield("        ")
        return HEAD + "\n".join(self.lines) + "\n"

    def _block(self, indent: str, depth: int) -> None:
        known = {kind: list(names) for kind, names in self._variables.items()}
        for _ in range(self._rng.randint(1, 4)):
            self._statement(indent, depth)
        if depth:
            self._variables = known

    def _statement(self, indent: str, depth: int) -> None:
        rng = self._rng
        drawn = rng.random()
        if drawn < 0.3:
            kind = rng.choice(["int", "float", "bool"])
            text, name = self._of(kind, 3), f"v{self._names}"
            self._names += 1
            self.lines.append(f"{indent}{name} = {text}")
            self._variables[kind].append(name)
        elif drawn < 0.5:
            state, kind = rng.choice([("number", "int"), ("share", "float"), ("seen", "bool")])
            change = "clear()" if rng.random() < 0.15 else f"set({self._of(kind, 3)})"
            self.lines.append(f"{indent}self.{state}.{change}")
        elif drawn < 0.65:
            column, kind = rng.choice([("n", "int"), ("x", "float"), ("f", "bool")])
            sign = rng.choice(["=", "+=", "-=", "*="]) if kind != "bool" else "="
            self.lines.append(f'{indent}record["{column}"] {sign} {self._of(kind, 2)}')
        elif drawn < 0.9 and depth < 2:
            self.lines.append(f"{indent}if {self._of('bool', 2)}:")
            self._block(indent + "    ", depth + 1)
            if rng.random() < 0.5:
                self.lines.append(f"{indent}else:")
                self._block(indent + "    ", depth + 1)
        elif depth and rng.random() < 0.3:
            self.lines.append(f"{indent}return")
        elif drawn < 0.97:
            self._yield(indent)
        else:
            self.lines.append(f"{indent}pass")

    def _yield(self, indent: str) -> None:
        if self._rng.random() < 0.3:
            self.lines.append(f"{indent}yield record")
            return
        integer, small = self._of("int", 2), f"({self._of('int', 2)}) % 1000"
        self.lines.append(
            f'{indent}yield {{"key": record["key"], "n": {integer}, "k": {small},'
            f' "x": {self._of("float", 2)}, "f": {self._of("bool", 2)}, "t": {self._time()},'
            ' "u": record["u"], "note": record["note"]}'
        )

    def _time(self) -> str:
        now = 'record["t"]'
        return self._rng.choice([now, f'max({now}, record["u"])', f'min(record["u"], {now})'])

    def _of(self, kind: str, depth: int) -> str:
        if depth == 0 or self._rng.random() < 0.2:
            return self._leaf(kind)
        draw = {"int": self._integer, "float": self._float, "bool": self._boolean}[kind]
        return draw(depth - 1)

    def _leaf(self, kind: str) -> str:
        own = {
            "int": [*_INTEGERS, 'record["n"]', 'record["k"]', "self.number.get()", "self.whole"],
            "float": [*_FLOATS, 'record["x"]', "self.share.get()", "self.part", "math.pi"],
            "bool": ["True", "False", 'record["f"]', "self.seen.get()"],
        }[kind]
        columns = [one for one in own if "record" in one or "self" in one]
        return self._rng.choice([*own, *columns, *self._variables[kind] * 3])

    def _integer(self, depth: int) -> str:
        a, b = self._of("int", depth), self._of("int", depth)
        x, y = self._of("float", depth), self._of("float", depth)
        f = self._of("bool", depth)
        signs = ["+", "-", "*", "//", "%", "&", "|", "^"]
        return self._rng.choice(
            [
                *(f"({a} {sign} {b})" for sign in signs),
                *(f"({a} {sign} {b})" for sign in signs[:5]),
                *(f"(-{a})", f"(~{a})", f"abs({a})", f"int({x})", f"int({f})", f"(+{a})"),
                *(f"min({a}, {b})", f"max({b}, {a})", f"({a} if {f} else {b})"),
                *(f"math.floor({y})", f"math.ceil({x})"),
            ]
        )

    def _float(self, depth: int) -> str:
        a, b = self._of("int", depth), self._of("int", depth)
        x, y = self._of("float", depth), self._of("float", depth)
        f = self._of("bool", depth)
        signs = ["+", "-", "*", "/", "//", "%"]
        return self._rng.choice(
            [
                *(f"({x} {sign} {y})" for sign in signs),
                *(f"({a} {sign} {y})" for sign in signs),
                *(f"({x} {sign} {b})" for sign in signs),
                *(f"({a} / {b})", f"(-{x})", f"abs({y})", f"float({a})", f"math.sqrt(abs({x}))"),
                *(f"min({x}, {y})", f"max({y}, {x})", f"({x} if {f} else {y})"),
            ]
        )

    def _boolean(self, depth: int) -> str:
        a, b = self._of("int", depth), self._of("int", depth)
        x, y = self._of("float", depth), self._of("float", depth)
        f, g = self._of("bool", depth), self._of("bool", depth)
        less, other = self._rng.choice(["<", "<=", "==", "!="]), self._rng.choice([">", ">=", "<"])
        return self._rng.choice(
            [
                *(f"({a} {less} {b})", f"({x} {other} {y})", f"({a} {other} {y})"),
                *(f"({a} {less} {b} {other} {a})", f"({x} {less} {b})", f"(not {f})"),
                *(f"({f} and {g})", f"({f} or {g})", f"({f} ^ {g})", f"({f} == {g})"),
                *(f"math.isnan({x})", f"math.isfinite({y})", f"bool({a})", f"bool({x})"),
                '(record["t"] < record["u"])',
            ]
        )
