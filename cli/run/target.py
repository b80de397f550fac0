"""The loader of the pipeline for `onceflow run`, from a file or a module.

    job.py:pipeline              `pipeline` of the file job.py
    package.module:pipeline      `pipeline` of a module, which may be in the working directory
    connector.toml               the job that a file describes

The name refers to a `Pipeline`, or to a function that returns one and takes a Spark session or
nothing. Definitions in a file are pickled to the slots by value, like those in `__main__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cloudpickle

from onceflow.cli.run.file.connector_file import read_connector_file
from onceflow.core.api.pipeline import Pipeline
from onceflow.core.errors import ConfigError, OnceflowError

_FORMS = (
    "connector.toml, job.py:NAME or package.module:NAME, where NAME is a Pipeline or a function"
    " that returns one"
)


class TargetFailed(Exception):
    """Raised when the user's code raises an error, which is the cause."""


@dataclass(frozen=True, slots=True)
class PipelineTarget:
    """The object found under a name."""

    text: str
    value: Pipeline | Callable[..., object]
    master: str | None = None
    """The Spark master in a connector file."""
    spark: Mapping[str, str] = field(default_factory=dict[str, str])
    """The settings of Spark in a connector file."""
    is_file: bool = False
    """True for a connector file, which describes the same job for every cluster."""

    @property
    def takes_cluster(self) -> bool:
        """True if the object is a function of a session."""
        return not isinstance(self.value, Pipeline) and bool(_list_required(self.value))

    def check(self) -> None:
        """Raise ConfigError if it is not a Pipeline or a function of at most one argument."""
        if isinstance(self.value, Pipeline):
            return
        if kind := _find_wrong_kind(self.value):
            raise ConfigError(
                f"{self.text} is a {kind} and neither a Pipeline nor a function that returns one"
            )
        names = _list_required(self.value)
        if len(names) > 1:
            raise ConfigError(
                f"{self.text} takes {', '.join(names)}: `onceflow run` passes only a Spark"
                " session, or nothing; read the other values from the environment or from a file"
            )

    def build(self, cluster: Callable[[], object]) -> Pipeline:
        """Return the pipeline. `cluster` opens the session if the function takes one.

        Raises:
            ConfigError: The function does not return a Pipeline.
            TargetFailed: The function raises an error.
        """
        if isinstance(self.value, Pipeline):
            return self.value
        arguments = (cluster(),) if self.takes_cluster else ()
        try:
            pipeline = self.value(*arguments)
        except OnceflowError:
            raise
        except Exception as error:  # the user's own function may raise anything
            raise TargetFailed(f"{self.text} raised") from error
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(
                f"{self.text} returns a {type(pipeline).__name__}; it must return its Pipeline"
            )
        return pipeline


def load_target(text: str) -> PipelineTarget:
    """Load the target `text`: read the connector file, or import the file or module.

    Raises:
        ConfigError: There is no such file, module or name. The message has a similar name.
        TargetFailed: The file or module raises an error when it is imported.
    """
    if text.endswith(".toml"):
        described = read_connector_file(Path(text))
        return PipelineTarget(text, described.build, described.master, described.spark, True)
    location, separator, name = text.rpartition(":")
    if not separator or not location or not name:
        near = f"; did you mean {text}:pipeline?" if text.endswith(".py") else ""
        raise ConfigError(f"{text!r} is not {_FORMS}{near}")
    module = _load_file(Path(location)) if location.endswith(".py") else _load_module(location)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{location} has no {name!r}{_suggest(part, value)}")
        value = getattr(value, part)
    target = PipelineTarget(text, cast("Pipeline | Callable[..., object]", value))
    target.check()
    return target


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"file {path} does not exist in {Path.cwd()}; run this in its directory, or write its"
            " whole path"
        )
    _put_on_path(path.resolve().parent)
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path.resolve()):
        name = f"{name}_of_onceflow_run"  # a loaded module already has this name
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    # Register before executing: pickling, and dataclasses with annotations as text, look up the
    # module of a class by name.
    sys.modules[name] = module
    # Workers on other machines do not have this file.
    cloudpickle.register_pickle_by_value(module)
    try:
        spec.loader.exec_module(module)
    except OnceflowError:
        raise
    except Exception as error:  # the user's own module may raise anything
        raise TargetFailed(f"{path} raised when it was imported") from error
    return module


def _load_module(name: str) -> ModuleType:
    _put_on_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only if the module itself or a parent package is missing. A failing import inside the
        # module is the user's error and keeps its traceback.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            file = Path(*name.split(".")).with_suffix(".py")
            near = f"; did you mean {file}:NAME?" if file.is_file() else ""
            advice = near or f"; run this in the directory of its package, now {Path.cwd()}"
            raise ConfigError(f"module {error.name!r} cannot be found{advice}") from None
        raise TargetFailed(f"module {name} raised when it was imported") from error
    except OnceflowError:
        raise
    except Exception as error:  # the user's own module may raise anything
        raise TargetFailed(f"module {name} raised when it was imported") from error


def _put_on_path(directory: Path) -> None:
    """Make `directory` importable in this process and in the Python workers that it starts."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    inherited = os.environ.get("PYTHONPATH", "")
    if str(directory) not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(directory), inherited)))


def _find_wrong_kind(value: object) -> str:
    """Return the kind of `value` if it cannot return a pipeline, or "" if it can."""
    if isinstance(value, type):
        return "class"
    return "" if callable(value) else type(value).__name__


def _list_required(function: Callable[..., object]) -> list[str]:
    """Return the required arguments of `function`."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
    ]


def _suggest(name: str, holder: object) -> str:
    candidates = [
        known
        for known, value in vars(holder).items()
        if not known.startswith("_") and (isinstance(value, Pipeline) or inspect.isfunction(value))
    ]
    near = get_close_matches(name, candidates, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(candidates)}" if candidates else ""
