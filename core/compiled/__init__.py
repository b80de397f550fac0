"""The translation of functions by record to machine code."""

from onceflow.core.compiled.kernels import load_kernel
from onceflow.core.compiled.translation import translate_function
from onceflow.core.plan.compiled_function import CompiledFunction, OutputColumn, StateColumn

__all__ = [
    "CompiledFunction",
    "OutputColumn",
    "StateColumn",
    "load_kernel",
    "translate_function",
]
