"""The context of a job in its driver: what all attempts of the job use."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field

from onceflow.core.runtime.cluster.cluster import Cluster
from onceflow.core.runtime.driver.attempt_context import AttemptEvent
from onceflow.core.runtime.driver.job_plan import JobPlan
from onceflow.core.runtime.driver.log_owner import LogOwner
from onceflow.core.runtime.driver.observation import Observation
from onceflow.core.runtime.driver.savepoint_restore import SavepointRestore
from onceflow.core.runtime.driver.savepoints import Savepoints
from onceflow.core.runtime.slot.program import Program, pickle_program
from onceflow.core.runtime.transport import credentials
from onceflow.core.settings.pipeline_settings import TlsFiles
from onceflow.core.storage import CheckpointStorage, JobStorage


@dataclass(frozen=True, slots=True)
class JobContext:
    """The objects that one job has in its driver, from `start` to its end."""

    cluster: Cluster
    plan: JobPlan
    program: bytes = field(repr=False)
    """The pickled program that slots are deployed with; see `slot.program`."""
    checkpoint_storage: CheckpointStorage
    """The storage as the user named it; slots open it, too."""
    storage: JobStorage
    owner: LogOwner
    savepoints: Savepoints
    observation: Observation
    events: queue.SimpleQueue[AttemptEvent]
    """The events for the running attempt. Requests stay in the queue until an attempt runs."""


def open_job(cluster: Cluster, plan: JobPlan) -> JobContext:
    """Check `plan`, open its storage, and return the context. Nothing is claimed yet.

    Raises:
        ConfigError: The program cannot be pickled, the cluster has too few slots, or a package or a
            file that the settings need is missing.
    """
    observation = Observation(
        plan.name,
        plan.graph,
        plan.listeners,
        plan.checkpointing.settings(),
        plan.settings,
        plan.metrics,
        plan.logging,
        plan.telemetry,
    )
    # Pickle on the caller's thread: a program that cannot be pickled is refused before the job
    # starts.
    program = pickle_program(Program(plan.graph, plan.backend))
    if isinstance(plan.settings.tls, TlsFiles):
        # Read the files only to see that they exist: each attempt reads them anew.
        credentials.identity_in(plan.settings.tls)
    cluster.check(plan.parallelism)
    described = plan.checkpointing.checkpoint_storage()
    storage, native_form = described.open(plan.name), plan.backend.native_form
    savepoints = Savepoints(
        plan.name,
        described,
        storage,
        plan.checkpointing.savepoints,
        native_form,
        plan.checkpointing.settings().timeout_s,
    )
    restore = (
        None
        if plan.restore is None
        else SavepointRestore(plan.restore, described, storage, native_form)
    )
    return JobContext(
        cluster,
        plan,
        program,
        described,
        storage,
        LogOwner(plan, storage, restore, observation.tracker.publish),
        savepoints,
        observation,
        queue.SimpleQueue(),
    )
