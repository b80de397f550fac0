"""A real YARN as one process of this machine: a ResourceManager, and two NodeManagers it directs.

They are Apache Hadoop's own, in one JVM, as Hadoop's tests run them (MiniYARNCluster). Containers
are processes of this machine, each the leader of a session. Nobody proves who he is.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from tests.support.servers.hdfs import JVM_OPTIONS, hadoop_jars
from tests.support.standalone import SPARK_HOME

from onceflow.integration.faults.processes import Watchdog, kill_tree
from onceflow.integration.servers.kafka_jars import java_command

NODES = 2
_CONNECT_TIMEOUT_MS = 60_000
_SETTINGS = {
    # It has one queue, and needs no file that describes it.
    "yarn.resourcemanager.scheduler.class": "org.apache.hadoop.yarn.server.resourcemanager.scheduler.fifo.FifoScheduler",  # noqa: E501 - one name
    "yarn.scheduler.minimum-allocation-mb": "128",
    "yarn.minicluster.yarn.nodemanager.resource.memory-mb": "4096",
    # A JVM reserves addresses that it never uses. What a container has in memory is bounded.
    "yarn.nodemanager.vmem-check-enabled": "false",
    "yarn.nodemanager.pmem-check-enabled": "true",
    # A disk that is fuller than that would take every node away; 90 by default.
    "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
}
_ADDRESSES = ("yarn.resourcemanager.address", "yarn.resourcemanager.scheduler.address")


@dataclass(frozen=True, slots=True)
class YarnCluster:
    """A running cluster."""

    pid: int
    """Of its JVM; containers are its descendants."""
    configuration: Path
    """What clients are given as HADOOP_CONF_DIR."""
    logs: Path
    """What containers have printed lies below it."""


@contextmanager
def yarn_cluster(directory: Path, file_system: str) -> Generator[YarnCluster]:
    """Run it for as long as the context lasts; all containers end with it.

    Args:
        directory: Where it keeps files of applications, logs and the clients' configuration.
        file_system: Where clients leave what containers need, as Hadoop names it (`hdfs://…`).
    """
    java = Path(java_command()).resolve()
    with (directory / "yarn.log").open("w") as log:
        (py4j,) = (SPARK_HOME / "jars").glob("py4j-*.jar")
        port, token, process = launch_gateway(
            jarpath=str(py4j),
            classpath=f"{hadoop_jars()}/*",
            javaopts=[
                *JVM_OPTIONS,
                "--add-opens=java.base/java.lang=ALL-UNNAMED",  # its pages need it
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                f"-Dtest.build.data={directory / 'data'}",
            ],
            redirect_stdout=log,
            redirect_stderr=log,
            java_path=str(java),
            create_new_process_group=True,
            enable_auth=True,
            cwd=directory,
            return_proc=True,
        )
        watchdog = Watchdog(process.pid)
        parameters = GatewayParameters(port=port, auth_token=token)
        gateway = JavaGateway(gateway_parameters=parameters)
        try:
            addresses = _start(gateway.jvm.org.apache.hadoop.yarn, java.parents[1])
            configuration = directory / "configuration"
            configuration.mkdir()
            _write(configuration / "core-site.xml", {"fs.defaultFS": file_system})
            _write(configuration / "yarn-site.xml", addresses)
            yield YarnCluster(process.pid, configuration, directory / "data")
        finally:
            gateway.close()
            kill_tree(process.pid)
            process.communicate()  # and close its pipes
            watchdog.release()


def _start(yarn: Any, java_home: Path) -> Mapping[str, str]:
    """Return, once all nodes are there, the settings by which clients find the cluster."""
    settings = yarn.conf.YarnConfiguration()
    containers = {"yarn.nodemanager.admin-env": f"JAVA_HOME={java_home}"}
    for name, value in (_SETTINGS | containers).items():
        settings.set(name, value)
    one_directory = 1
    cluster = yarn.server.MiniYARNCluster("yarn", NODES, one_directory, one_directory)
    cluster.init(settings)
    cluster.start()
    assert cluster.waitForNodeManagersToConnect(_CONNECT_TIMEOUT_MS)
    running = cluster.getConfig()
    return {name: str(running.get(name)) for name in _ADDRESSES}


def _write(path: Path, settings: Mapping[str, str]) -> None:
    properties = "".join(
        f"<property><name>{name}</name><value>{escape(value)}</value></property>\n"
        for name, value in settings.items()
    )
    path.write_text(f"<configuration>\n{properties}</configuration>\n", encoding="utf-8")
