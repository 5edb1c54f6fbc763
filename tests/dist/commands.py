"""Every command of an installed QuackMQ, run once, as a user with some extras runs them.

The environment has what the extras install and nothing else, so that a package that nobody declared
is missed. Each command must end well; one that needs an extra that is not there must say which.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tests.dist import listeners
from tests.kit.server import Server

#: Spark's first start on a busy machine is most of it.
COMMAND_S = 300
TOPIC = "dist"
LISTENERS = ("kafka", "http", "zmq", "line")
#: What Spark's scripts call, of all that lies where Java usually lies, too.
PROGRAMS = (
    *("bash", "sh", "env", "dirname", "basename", "readlink", "uname", "ps", "rm", "cat", "nice"),
)


class Installed:
    """A Python with QuackMQ in it, and a directory to work in."""

    def __init__(self, python: Path, directory: Path) -> None:
        self._python = str(python)
        self.command = [self._python, "-m", "quackmq"]
        self._directory = directory
        self._programs = directory / "programs"
        self._programs.mkdir(parents=True)
        for name in PROGRAMS:
            if (found := shutil.which(name)) is not None:
                (self._programs / name).symlink_to(found)

    def run_all(self, extras: Collection[str]) -> list[str]:
        """Run every command once; return what was run, in words."""
        done = self._run_alone()
        served = ("serve", "--data", self._directory / "data")
        listeners = [word for listener in LISTENERS for word in (f"--{listener}", "127.0.0.1:0")]
        environment = self._environment(extras)
        with Server(*served, *listeners, environment=environment, command=self.command) as server:
            addresses = server.listeners()
            done += self._run_clients(addresses)
            done += self._use_listeners(addresses)
            done += self._run_pipelines(addresses["kafka"], extras)
            server.send(signal.SIGTERM)
            assert server.exit_code() == 0, server.errors()
        data = self._directory / "data"
        for words in (("log", "ls"), ("log", "verify"), ("archive", "ls"), ("archive", "verify")):
            done.append(self._run(*words, data))
        shutil.rmtree(data)
        return ["serve", *done]

    def _run_alone(self) -> list[str]:
        experiment = ("experiment", "--seconds", "1", "--rate", "20")
        return [self._run("--version"), self._run("pipeline", "ls"), self._run(*experiment)]

    def _run_clients(self, addresses: Mapping[str, str]) -> list[str]:
        kafka = ("--broker", addresses["kafka"])
        put = self._run("put", TOPIC, "a", "b", *kafka)
        get = self._run("get", TOPIC, "--count", "2", *kafka)
        clock = self._run("clock", "show", "--http", addresses["http"])
        done = [put, get, clock]
        for listener in ("line", "zmq", "xpub", "kafka"):
            address = addresses["proxy" if listener == "xpub" else listener]
            few = ("--acts", "5", "--seconds", "20", "--seed", "17", "--faults", "")
            done.append(self._run("chaos-client", "--door", listener, "--address", address, *few))
        return done

    def _use_listeners(self, addresses: Mapping[str, str]) -> list[str]:
        program = str(Path(listeners.__file__))
        words = [self._python, program, *(addresses[listener] for listener in LISTENERS)]
        told = self._call(words, ())
        assert told.returncode == 0, f"{words} ended with {told.returncode}: {told.stderr}"
        return ["a message through each listener"]

    def _run_pipelines(self, kafka: str, extras: Collection[str]) -> list[str]:
        audit = ("pipeline", "run", "audit", "--topics", TOPIC, "--broker", kafka)
        if "spark" not in extras:
            self._fails("quackmq[spark]", *audit)
            return []
        picture = self._directory / "simulate.png"
        drawn = (
            *("pipeline", "run", "simulate", "--requests", "20", "--workers", "1"),
            *("--broker", kafka, "--plot", str(picture)),
        )
        if "plot" not in extras:
            self._fails("quackmq[plot]", *drawn)
            return [self._run(*audit, extras=extras)]
        done = self._run(*drawn, extras=extras)
        assert picture.stat().st_size > 0, "no picture was drawn"
        return [done]

    def _run(self, *words: str | Path, extras: Collection[str] = ()) -> str:
        told = self._tell(words, extras)
        assert told.returncode == 0, f"{words} ended with {told.returncode}: {told.stderr}"
        return " ".join(map(str, words[:3]))

    def _fails(self, hint: str, *words: str | Path) -> None:
        told = self._tell(words, ())
        assert told.returncode not in (0, -signal.SIGKILL) and hint in told.stderr, told
        assert "Traceback" not in told.stderr, told.stderr

    def _tell(
        self, words: tuple[str | Path, ...], extras: Collection[str]
    ) -> subprocess.CompletedProcess[str]:
        return self._call([*self.command, *map(str, words)], extras)

    def _call(
        self, command: Sequence[str], extras: Collection[str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self._environment(extras),
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )

    def _environment(self, extras: Collection[str]) -> dict[str, str]:
        """Without a Java where the extra `java` has to bring one; and without a `PYTHONPATH`."""
        path = str(self._programs)
        if "java" not in extras and (java := shutil.which("java")) is not None:
            path += f":{Path(java).parent}"
        return {"PATH": path, "TMPDIR": str(self._directory), "HOME": str(self._directory)}
