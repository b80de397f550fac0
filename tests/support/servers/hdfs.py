"""A real HDFS as one process of this machine: a NameNode, and a DataNode that it directs.

Both are Apache Hadoop's own, in one JVM, as Hadoop's tests run them. Nobody proves who he is: HDFS
believes every user name, and gives root and the user of this process all rights.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from onceflow.integration.servers.kafka_jars import jars_of, java_command
from onceflow.integration.servers.process import LOOPBACK, ServerProcess, free_port

JVM_OPTIONS = ("-Xms64m", "-Xmx400m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_READY_TIMEOUT_S = 1.0
HADOOP_VERSION = "3.4.2"
# All of HDFS and YARN in three jars; then what they take for granted: XML binding, which Java 17
# does not bring, certificates, and two logs.
_HADOOP_JARS = (
    ("org.apache.hadoop", "hadoop-client-minicluster", HADOOP_VERSION),
    ("org.apache.hadoop", "hadoop-client-runtime", HADOOP_VERSION),
    ("javax.xml.bind", "jaxb-api", "2.3.1"),
    ("org.bouncycastle", "bcpkix-jdk18on", "1.78.1"),
    ("ch.qos.reload4j", "reload4j", "1.2.22"),
    ("org.slf4j", "slf4j-simple", "1.7.36"),
)


def hadoop_jars() -> Path:
    """Return a directory with all that HDFS and YARN need, fetched once.

    Raises:
        ServerError: Neither client could fetch it; says what each answered.
    """
    return jars_of(
        f"hadoop-minicluster-{HADOOP_VERSION}",
        _HADOOP_JARS,
        f"Hadoop {HADOOP_VERSION} (102 MB, once)",
    )


class EmbeddedHdfs(ServerProcess):
    """An HDFS with one replica of each block, and WebHDFS on the loopback."""

    name: ClassVar[str] = "hdfs"

    def __init__(self, directory: Path | None = None, *, proxied: bool = False) -> None:
        """Choose ports; nothing runs before `start`. Fetches the jars when they are not cached.

        Args:
            directory: As in `ServerProcess`.
            proxied: As in `Server`: what goes to the NameNode; bytes go to the DataNode directly.
        """
        self._java = java_command()
        self._jars = hadoop_jars()
        super().__init__(directory, proxied=proxied)
        self._name_node_port = free_port()
        self._command_port = free_port()

    @property
    def url(self) -> str:
        """The root, as checkpoint storage is told it; add a path."""
        host, port = self.client_address
        return f"webhdfs://{host}:{port}"

    @property
    def file_system(self) -> str:
        """The root, as clients of Hadoop name it."""
        return f"hdfs://{LOOPBACK}:{self._name_node_port}"

    @override
    def _initialize(self) -> None:
        """Do nothing: the first start formats."""

    @override
    def _command(self) -> Sequence[str | Path]:
        data = self.directory / "dfs"
        settings = {
            "hdfs.minidfs.basedir": str(data),
            "dfs.replication": "1",
            # A NameNode that comes back would wait for so long before it lets names be changed.
            "dfs.namenode.safemode.extension": "0",
            "dfs.datanode.synconclose": "true",
            "dfs.webhdfs.user.provider.user.pattern": ".*",
        }
        return [
            *(self._java, *JVM_OPTIONS, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"),
            *("-cp", f"{self._jars}/*", "org.apache.hadoop.test.MiniDFSClusterManager"),
            *("-datanodes", "1", "-httpport", str(self.port)),
            *("-nnport", str(self._name_node_port), "-cmdport", str(self._command_port)),
            *([] if data.exists() else ["-format"]),
            *(part for name, value in settings.items() for part in ("-D", f"{name}={value}")),
        ]

    @override
    def _is_ready(self) -> bool:
        # A NameNode answers before it knows of its DataNode, and then there is no room for bytes.
        query = "qry=Hadoop:service=NameNode,name=FSNamesystemState"
        try:
            with urllib.request.urlopen(
                f"http://{LOOPBACK}:{self.port}/jmx?{query}", timeout=_READY_TIMEOUT_S
            ) as response:
                beans = json.load(response)["beans"]
        except (OSError, urllib.error.HTTPError, ValueError):
            return False
        return bool(beans) and beans[0]["NumLiveDataNodes"] == 1 and self._serves()

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://{LOOPBACK}:{self.port}/webhdfs/v1/?op=LISTSTATUS",
                timeout=_READY_TIMEOUT_S * 10,
            ) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.HTTPError):
            return False
