"""The cluster of `--master`: a Spark session, a Spark Connect session, or local processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, Union, cast

from onceflow.core.api.pipeline import Pipeline
from onceflow.core.runtime.cluster.local_processes import LocalProcesses

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

AnyCluster: TypeAlias = Union["SparkSession", "ConnectSession", LocalProcesses]
LOCAL_PROCESSES = "local-processes"
"""The master for running without Spark: slots are processes of this machine."""


@dataclass(slots=True)
class OpenedCluster:
    """The cluster of this run. It is opened when the pipeline is built."""

    master: str | None
    """The master, or None for the master that Spark is configured with, or else `local[*]`."""
    conf: dict[str, str] = field(default_factory=dict[str, str])
    """The settings of Spark."""
    session: SparkSession | ConnectSession | None = None

    def open(self) -> AnyCluster:
        """Return the cluster. A session is opened at the first call."""
        if self.master == LOCAL_PROCESSES:
            return LocalProcesses()
        if self.session is None:
            self.session = self._open_session()
        return self.session

    def adopt(self, pipeline: Pipeline) -> None:
        """Use the session of a pipeline that the program has built itself."""
        if not isinstance(pipeline.cluster, LocalProcesses):
            self.session = pipeline.cluster

    def close(self) -> None:
        """Stop the session if there is one. Idempotent."""
        session, self.session = self.session, None
        if session is not None:
            session.stop()

    def _open_session(self) -> SparkSession | ConnectSession:
        # Import here, because local processes do not need pyspark.
        from pyspark.sql import SparkSession

        from onceflow.connectors.spark.session import session

        conf = {name: value for name, value in self.conf.items() if name != "spark.master"}
        if self.master is None or not self.master.startswith("sc://"):
            return session(self.master, name="onceflow run", conf=conf)
        builder = SparkSession.Builder().appName("onceflow run").remote(self.master)
        for name, value in conf.items():
            builder = builder.config(name, value)
        return cast("ConnectSession", builder.getOrCreate())
