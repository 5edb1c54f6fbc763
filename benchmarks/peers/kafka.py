"""Apache Kafka: broker and controller in one process, from the jars that Maven fetches (pom.xml).

The options of the JVM are those of Kafka's own start script; the settings are its defaults, but for
those that a cluster of one needs, which are the ones of the file that it ships for that.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import packages
from benchmarks.packages import TARGET, Unavailable
from benchmarks.peers.base import Peer
from benchmarks.processes import HOST, Command, free_ports

POM: Final = Path(__file__).with_name("pom.xml")
JARS: Final = TARGET / "kafka"
OLDEST_JAVA: Final = 17
JVM_OPTIONS: Final = (
    "-Xmx1G",
    "-Xms1G",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)
#: Any will do, but it must be one.
CLUSTER_ID: Final = "UXVhY2tNUUJlbmNobWFyaw"


class Kafka(Peer):
    name = "kafka"
    title = "Kafka"
    client = "kafka"
    settings = (
        "KRaft, one node, its defaults and the JVM options of its start script (heap of 1 GiB)"
    )
    is_synced = False
    #: Beyond what a cluster of one needs.
    properties = ""

    def fetch(self) -> None:
        _check_java()
        if packages.is_made_from(POM, JARS):
            return
        if shutil.which("mvn") is None:
            raise Unavailable("Kafka's jars need Maven, which is not here")
        shutil.rmtree(JARS, ignore_errors=True)
        command = ("mvn", "--batch-mode", "--quiet", "--file", str(POM), "process-resources")
        done = subprocess.run(
            (*command, f"-Djars={JARS}"),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise packages.unavailable("Kafka's jars", done.stdout)
        packages.mark_made_from(POM, JARS)

    def version(self) -> str:
        (jar,) = JARS.glob("kafka-clients-*.jar")
        return f"{jar.stem.removeprefix('kafka-clients-')}, OpenJDK {_java_version()}"

    def prepare(self, directory: Path, port: int) -> Sequence[Command]:
        (controller,) = free_ports(1)
        properties = directory / "server.properties"
        properties.write_text(
            "process.roles=broker,controller\n"
            "node.id=1\n"
            "controller.listener.names=CONTROLLER\n"
            f"listeners=PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}\n"
            f"controller.quorum.bootstrap.servers={HOST}:{controller}\n"
            f"log.dirs={directory / 'data'}\n"
            "offsets.topic.replication.factor=1\n"
            "transaction.state.log.replication.factor=1\n"
            "transaction.state.log.min.isr=1\n" + self.properties
        )
        format_it = ("format", "--standalone", "--cluster-id", CLUSTER_ID)
        tool = (*_java(), "kafka.tools.StorageTool", *format_it, "--config", str(properties))
        subprocess.run(tool, check=True, capture_output=True)
        return [Command((*_java(*JVM_OPTIONS), "kafka.Kafka", str(properties)))]


class KafkaThatFlushes(Kafka):
    name = "kafka-flush"
    title = "Kafka, flushing"
    settings = "the same with `log.flush.interval.messages=1`"
    is_synced = True
    properties = "log.flush.interval.messages=1\n"


def _java(*options: str) -> tuple[str, ...]:
    return ("java", *options, "-cp", f"{JARS}/*")


def _java_version() -> str:
    if shutil.which("java") is None:
        raise Unavailable("Kafka needs Java, which is not here")
    said = subprocess.run(("java", "-version"), capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "([^"]+)"', said)
    if found is None:
        raise Unavailable(f"Kafka needs Java, and this does not say which it is: {said}")
    return found.group(1)


def _check_java() -> None:
    version = _java_version()
    if int(version.split(".")[0]) < OLDEST_JAVA:
        raise Unavailable(f"Kafka needs Java {OLDEST_JAVA} or later, and this is {version}")
