"""Runs a test's job on processes of this machine, and a few tests of each kind on Spark too.

A test that takes the fixture `cluster` runs on local processes; one that is marked `ON_BOTH` also
runs on Spark, and one that is marked `SLOWLY_ON_SPARK` does so among the slow tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union

import pytest

from onceflow import LocalProcesses

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AnyCluster: TypeAlias = Union["SparkSession", LocalProcesses]

ON_BOTH = pytest.mark.parametrize(
    "cluster", ["local", pytest.param("spark", marks=pytest.mark.spark)], indirect=True
)
SLOWLY_ON_SPARK = pytest.mark.parametrize(
    "cluster",
    ["local", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.slow])],
    indirect=True,
)
"""What is the same code wherever slots run."""
