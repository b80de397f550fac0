"""Functions of a record as machine code: which ones can be, and what they are translated to."""

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
