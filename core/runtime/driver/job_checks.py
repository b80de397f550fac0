"""The checks of a job's start, run without starting the job or changing anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.runtime.cluster.cluster import Cluster
from onceflow.core.runtime.driver import restore
from onceflow.core.runtime.driver.job_plan import JobPlan
from onceflow.core.spi import CommitterContext
from onceflow.core.spi.connector import Area, Finding
from onceflow.core.storage import JobStorage


def check_job(cluster: Cluster, plan: JobPlan) -> tuple[Finding, ...]:
    """Return the findings of the cluster, the storage, every source and every sink.

    Changes nothing. Checks that an earlier problem makes impossible are left out.
    """
    findings = [
        _ask(
            Area("cluster"),
            lambda: cluster.check(plan.parallelism),
            f"{plan.parallelism} slots can run",
        )
    ]
    for uid, source in plan.graph.sources():
        name = type(source).__name__
        findings.append(_ask(Area(f"source {uid}"), source.validate, f"{name} can be read"))
    storage = plan.checkpointing.checkpoint_storage().open(plan.name)
    area = Area("checkpoints")
    try:
        view = storage.log.read()
    except OnceflowError as error:
        return (*findings, area.problem(str(error), "", ""))
    findings.append(_ask(area, lambda: _check_restore(plan, storage, view), _describe(view)))
    findings += _check_sinks(plan, storage, view)
    return tuple(findings)


def _check_sinks(plan: JobPlan, storage: JobStorage, view: LogView) -> Sequence[Finding]:
    findings: list[Finding] = []
    for operator, work in plan.graph.sinks():
        context = CommitterContext(
            plan.name,
            operator.uid,
            work.sink_id,
            AttemptId(view.attempt + 1),
            # A job that never ran has no identity yet, and this check must not create one.
            log_id=storage.log_id if view.attempt else "",
            staging=storage.staging(work.sink_id),
        )

        validate = partial(work.sink.validate, context, operator.schema)
        text = f"{type(work.sink).__name__} takes these rows"
        findings.append(_ask(Area(f"sink {operator.uid}"), validate, text))
    return findings


def _check_restore(plan: JobPlan, storage: JobStorage, view: LogView) -> None:
    """Raise an error unless the pipeline can restore the last checkpoint."""
    restore.check_sinks(plan.graph, view, plan.retired_sinks)
    if not view.decided:
        restore.check_others(plan.name, plan.graph, storage.others())
        return
    restored = view.completed[-1]
    restore.check_max_parallelism(restored, plan.max_parallelism or restored.max_parallelism)
    if not plan.allow_non_restored_state:
        restore.check_operators(plan.graph, restored)
        restore.check_settings(plan.graph, restored)
    if restored.checkpoint != plan.checkpointing.ignore_in_flight_of:
        restore.check_in_flight(plan.graph, restored)


def _describe(view: LogView) -> str:
    if not view.decided:
        return "there is no checkpoint yet: the job would start as a new job"
    last = view.completed[-1]
    return f"the job would continue from checkpoint {last.checkpoint}"


def _ask(area: Area, question: Callable[[], None], good: str) -> Finding:
    try:
        question()
    except ConfigError as error:
        return area.problem(str(error), "", "")
    except OnceflowError as error:
        return area.problem(f"{type(error).__name__}: {error}", "", "")
    return area.ok(good)
