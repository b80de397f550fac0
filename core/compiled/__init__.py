"""The translation of functions by record to machine code."""

from onceflow.core.compiled.kernels import load_kernel
from onceflow.core.compiled.program import CompiledFunction, OutputColumn, StateColumn
from onceflow.core.compiled.translation import translate_function

__all__ = [
    "CompiledFunction",
    "OutputColumn",
    "StateColumn",
    "load_kernel",
    "translate_function",
]
