"""The output of `onceflow run --plan`: operators, their inputs and exchanges, and all settings."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from onceflow.cli.terminal import print_listing
from onceflow.core.api.pipeline import PipelineDescription
from onceflow.core.runtime.driver.job_views import OperatorView


def print_plan(console: Console, plan: PipelineDescription) -> None:
    """Print `plan` for people: a listing of operators, then a listing of settings."""
    console.print(
        f"job {plan.name}, parallelism {plan.graph.parallelism}, checkpoints in"
        f" {plan.storage.open(plan.name)}",
        markup=False,
        soft_wrap=True,
    )
    headings = ("OPERATOR", "WHAT", "INPUT", "EXCHANGE")
    rows = [
        [(operator.uid, "bold"), *((cell, "") for cell in _describe(operator, plan))]
        for operator in plan.graph.operators
    ]
    print_listing(console, headings, rows)
    settings = [
        [
            (setting.name, "" if setting.origin == "default" else "bold"),
            *((cell, "") for cell in (setting.value, setting.origin)),
        ]
        for setting in plan.settings
    ]
    print_listing(console, ("SETTING", "VALUE", "ORIGIN"), settings)


def to_json(plan: PipelineDescription) -> dict[str, Any]:
    """Return the `--json` output for `plan`."""
    return {
        "job": plan.name,
        "storage": str(plan.storage.open(plan.name)),
        "graph": asdict(plan.graph),
        "settings": [asdict(setting) for setting in plan.settings],
    }


def _describe(operator: OperatorView, plan: PipelineDescription) -> tuple[str, str, str]:
    """Return an operator's kind and name, its inputs, and its exchange."""
    edges = [edge for edge in plan.graph.edges if edge.below == operator.uid]
    ways = dict.fromkeys(
        edge.exchange.replace("_", " ") + (f" {', '.join(edge.key)}" if edge.key else "")
        for edge in edges
    )
    what = operator.name if operator.name == operator.kind else f"{operator.kind} {operator.name}"
    letters = " (dead letters)" if operator.takes_dead_letters else ""
    exchange = ", ".join(ways) or ("-" if operator.kind == "source" else "same slot")
    return what + letters, ", ".join(operator.inputs) or "-", exchange
