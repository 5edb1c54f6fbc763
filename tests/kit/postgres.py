"""A PostgreSQL server of the tests' own, in a temporary directory and on a free port.

Its programs come from Debian's package; the system's cluster is never used. The server runs with
`fsync` on, as a broker requires. PostgreSQL refuses to run as root, so root starts it as another
user. A server is shared by the tests of one process: each test gets a database of its own.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from tests.kit.server import DEADLINE_S
from tests.memory_directory import find_memory

#: The database user whom initdb creates: a superuser.
USER = "quackmq"
#: Users whom root can start the server as, the first that exists.
SERVER_USERS = ("postgres", "nobody")

#: Settings that keep a small server small. All others are PostgreSQL's defaults.
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "16MB",
    "max_connections": "60",
    # A test that stops the server does not wait for a large checkpoint.
    "max_wal_size": "64MB",
    "min_wal_size": "32MB",
    # Few processes beside those of connections.
    "max_logical_replication_workers": "0",
    "log_min_messages": "warning",
}

#: Ends all other sessions of a database, and removes its tables and its own settings.
EMPTY_DATABASE = """
    select pg_terminate_backend(pid, 60000) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid();
    drop schema if exists quackmq cascade;
    drop schema public cascade;
    create schema public;
    alter database {database} reset all;
"""

#: Ends all other sessions of a database, and removes all rows of its store. To truncate a table
#: takes longer, because that makes new files.
EMPTY_STORE = """
    select pg_terminate_backend(pid, 60000) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid();
    delete from quackmq.topic_settings;
    delete from quackmq.partitions;
    delete from quackmq.batches;
    delete from quackmq.producers;
    delete from quackmq.aborted_transactions;
    delete from quackmq.cursors;
    delete from quackmq.states;
    delete from quackmq.owner;
    delete from quackmq.heartbeat;
    delete from quackmq.last_cycle;
"""


def find_program(name: str) -> str:
    """Return the path of one of PostgreSQL's programs, of the newest installed version."""
    installed = sorted(
        Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3])
    )
    found = str(installed[-1]) if installed else shutil.which(name)
    assert found is not None, f"{name} is not installed: run tools/programs.sh"
    return found


class PostgresServer:
    """One server. Call `start` first and `close` last, also when a test has failed."""

    def __init__(self, **settings: str) -> None:
        """Create the data directory. `settings` override those of every server."""
        self._settings = SETTINGS | settings
        self.directory = Path(tempfile.mkdtemp(prefix="quackmq-postgres-", dir=find_memory()))
        self.port = _find_free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._database_numbers = count(1)
        self._empty_databases: list[str] = []
        self._store_database: str | None = None
        try:
            self._create_data_directory()
        except BaseException:
            shutil.rmtree(self.directory)
            raise

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> str:
        """What the server has reported so far."""
        return (self.directory / "log").read_text(errors="replace")

    def url(self, database: str = "postgres", user: str = USER) -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server, on the same port each time; wait until it accepts connections."""
        assert self._process is None
        deadline_s = time.monotonic() + DEADLINE_S
        while not self._try_to_start(deadline_s):
            # Children of a killed server still use its memory: they end by themselves.
            assert "shared memory block" in self.log, f"the server has ended: {self.log}"
            time.sleep(0.05)

    def _try_to_start(self, deadline_s: float) -> bool:
        """Start the server and wait until it is ready; return False if it has ended before."""
        arguments = ["-D", str(self.data), "-p", str(self.port)]
        for name, value in self._settings.items():
            arguments += ["-c", f"{name}={value}"]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [find_program("postgres"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                **_as_server_user(),
            )
        while not self._is_ready():
            assert time.monotonic() < deadline_s, f"the server is not ready: {self.log}"
            if self._process.poll() is not None:
                self._process = None
                return False
            time.sleep(0.01)
        return True

    def stop(self) -> None:
        """Stop the server in order: connections are closed, and a checkpoint is made."""
        self._end(signal.SIGINT)

    def stop_immediately(self) -> None:
        """Stop the server as `pg_ctl stop -m immediate` does: the next start is a recovery."""
        self._end(signal.SIGQUIT)

    def kill(self) -> None:
        """Kill the main process; its children notice that and end."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop the server, if it runs, and remove its directory."""
        try:
            if self._process is not None:
                self.stop_immediately()
        finally:
            shutil.rmtree(self.directory)

    def execute(self, sql: str, database: str = "postgres", user: str = USER) -> str:
        """Run SQL with psql; return what it prints, a line per row."""
        done = subprocess.run(
            [find_program("psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql]
            + [self.url(database, user)],
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def wait_for_setting(self, name: str, value: str) -> None:
        """Wait until new connections see a changed setting."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.execute(f"show {name}") != value:
            assert time.monotonic() < deadline_s, f"{name} does not become {value}"
            time.sleep(0.01)

    @contextmanager
    def store(self) -> Iterator[str]:
        """Return the URL of a database without data. Its schema is kept for the next test, since to
        create it takes longer than most tests."""
        if self._store_database is None:
            self._store_database = "stores"
            self.execute("create database stores")
        yield self.url(self._store_database)
        self.execute(EMPTY_STORE, self._store_database)

    @contextmanager
    def database(self) -> Iterator[str]:
        """Return the URL of an empty database. It is emptied afterwards and used again, since to
        create one takes a second on a slow disk."""
        if not self._empty_databases:
            name = f"test_{next(self._database_numbers)}"
            self.execute(f"create database {name}")
            self._empty_databases.append(name)
        name = self._empty_databases.pop()
        yield self.url(name)
        self.execute(EMPTY_DATABASE.format(database=name), name)
        self._empty_databases.append(name)

    def _create_data_directory(self) -> None:
        user = _server_user()
        if user is not None:
            os.chown(self.directory, user.pw_uid, user.pw_gid)
        done = subprocess.run(
            [find_program("initdb"), "-D", str(self.data), "--username", USER, "--auth=trust"]
            # The files of an empty server need not survive a power cut during a test.
            + ["--no-sync", "--encoding=UTF8", "--locale=C"],
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
            cwd=self.directory,
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            **_as_server_user(),
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _is_ready(self) -> bool:
        """Return whether this server accepts connections: its file says so, in its eighth line."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        process = self._process
        assert process is not None
        return len(lines) >= 8 and int(lines[0]) == process.pid and lines[7].strip() == "ready"

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        assert process is not None
        process.send_signal(number)
        process.wait(timeout=DEADLINE_S)
        self._process = None
        _wait_until_closed(self.port)


@cache
def _server_user() -> pwd.struct_passwd | None:
    """Return the user whom root starts the server as; None if this process is not root."""
    if os.geteuid() != 0:
        return None
    users = {user.pw_name: user for user in pwd.getpwall()}
    return next(users[name] for name in SERVER_USERS if name in users)


def _as_server_user() -> dict[str, Any]:
    """Return the arguments of `subprocess` that start a program as the server's user."""
    user = _server_user()
    if user is None:
        return {}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_closed(port: int) -> None:
    """Wait until no process listens on a port: children of a killed server may still do."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return
        assert time.monotonic() < deadline_s, f"port {port} is still open"
        time.sleep(0.01)
