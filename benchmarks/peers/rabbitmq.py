"""RabbitMQ with its stream plugin, and the port mapper that Erlang needs beside it.

The start script is the one inside the package, below the wrapper that would change to a user of
the system; all its paths are set. Erlang's own start script knows only the place where it would
have been installed, so there is another one. The port mapper would stay behind as a service, so it
is started here, on a port of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import packages
from benchmarks.peers.base import Peer
from benchmarks.processes import HOST, Command, free_ports

PACKAGE: Final = "rabbitmq-server"
ERLANG_OPTIONS: Final = "-noinput -kernel inet_dist_use_interface {127,0,0,1}"


class RabbitMQ(Peer):
    name = "rabbitmq"
    title = "RabbitMQ streams"
    client = "rabbitmq"
    settings = "the stream plugin alone, otherwise its defaults; streams never sync by themselves"
    is_synced = False

    def fetch(self) -> None:
        packages.fetch(PACKAGE)

    def version(self) -> str:
        script, erlang = _script(), _erlang()
        release = (erlang.parent.parent / "releases").glob("[0-9]*/OTP_VERSION")
        (otp,) = (path.read_text().strip() for path in release)
        return f"{script.parent.parent.name.rpartition('-')[2]}, Erlang/OTP {otp}"

    def prepare(self, directory: Path, port: int) -> Sequence[Command]:
        mapper_port, distribution_port = free_ports(2)
        (directory / "rabbitmq.conf").write_text(
            f"listeners.tcp = none\nstream.listeners.tcp.1 = {HOST}:{port}\nlog.console = true\n"
        )
        (directory / "plugins").write_text("[rabbitmq_stream].\n")
        _write_start_script(directory / "bin" / "erl")
        environment = packages.fetch(PACKAGE).environment | {
            "HOME": str(directory),  # for Erlang's cookie
            "ERL_EPMD_PORT": str(mapper_port),
            "ERL_EPMD_ADDRESS": HOST,
        }
        mapper = Command((str(_erlang() / "epmd"),), environment)
        return [
            mapper,
            Command((str(_script()),), environment | _paths(directory, distribution_port)),
        ]


def _script() -> Path:
    return packages.fetch(PACKAGE).find(
        "usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"
    )


def _erlang() -> Path:
    return packages.fetch(PACKAGE).find("usr/lib/erlang/erts-*/bin")


def _write_start_script(script: Path) -> None:
    binaries = _erlang()
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        f"export ROOTDIR={binaries.parent.parent} BINDIR={binaries} EMU=beam PROGNAME=erl\n"
        'exec "$BINDIR/erlexec" "$@"\n'
    )
    script.chmod(0o755)


def _paths(directory: Path, distribution_port: int) -> dict[str, str]:
    return {
        "PATH": f"{directory / 'bin'}:/usr/bin:/bin",
        "RABBITMQ_NODENAME": "quackmq-benchmark@localhost",
        "RABBITMQ_DIST_PORT": str(distribution_port),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ERLANG_OPTIONS,
        "RABBITMQ_ALLOW_INPUT": "true",  # so that the script becomes the server, without a wrapper
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "logs"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "generated"),
        "RABBITMQ_FEATURE_FLAGS_FILE": str(directory / "feature-flags"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
    }
