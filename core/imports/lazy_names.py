"""Packages whose public names are imported when they are first used (PEP 562).

The package lists each name three times: for type checkers (an import below `TYPE_CHECKING`), in
`__all__`, and here with the module that defines it. A unit test compares the three.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from onceflow.core.imports.extras import naming_extras


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of `package`. `modules` maps module to public names.

    At its first use a name becomes an ordinary attribute of the package, so later uses cost
    nothing. Errors from importing its module are raised unchanged, except that a missing package of
    an extra raises MissingExtra.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def get_attribute(name: str) -> object:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with naming_extras():
            value: object = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get_attribute, list_names
