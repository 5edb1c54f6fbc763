"""Addresses as people write them: HOST:PORT, [IPV6]:PORT, unix:PATH, and lists of host names. Pure;
nothing is resolved."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

UNIX_PREFIX = "unix:"
LAST_PORT = 65_535
_HOST_NAME: Final = re.compile(r"(\*\.)?([a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")


class Address(NamedTuple):
    """Where to listen, or what to tell others. Port 0 asks the system for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UnixPath(NamedTuple):
    path: str

    def __str__(self) -> str:
        return UNIX_PREFIX + self.path


def parse_address(text: str) -> Address:
    """Raises ValueError with a phrase that says what is wrong with `text`."""
    host, separator, port_text = text.rpartition(":")
    if not separator:
        raise ValueError("is not HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("has an IPv6 host without brackets: write [HOST]:PORT")
    if not host or any(c in "[]/" or c.isspace() for c in host):
        raise ValueError("has no usable host: write HOST:PORT")
    if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > LAST_PORT:
        raise ValueError(f"has no port between 0 and {LAST_PORT}")
    return Address(host, int(port_text))


def parse_advertised_address(text: str) -> Address:
    """An address for others to connect to, so its port must be a real one."""
    address = parse_address(text)
    if address.port == 0:
        raise ValueError("has port 0, to which nobody can connect")
    return address


def parse_address_or_path(text: str) -> Address | UnixPath:
    if ":" not in text:
        raise ValueError("is not HOST:PORT, nor unix:PATH")
    if not text.startswith(UNIX_PREFIX):
        return parse_address(text)
    path = text.removeprefix(UNIX_PREFIX)
    if not path:
        raise ValueError("has no path after unix:")
    return UnixPath(path)


def parse_host_names(text: str) -> tuple[str, ...]:
    """Return the names of a list with commas, in lower case and as DNS has them. `*` is any name,
    and `*.NAME` every name below NAME. ValueError with a phrase that says what is wrong."""
    names = [_host_name(part.strip()) for part in text.split(",") if part.strip()]
    return tuple(dict.fromkeys(names))


def _host_name(text: str) -> str:
    name = text.rstrip(".").lower()
    if name == "*":
        return name
    try:
        name = name.encode("idna").decode() if not name.isascii() else name
    except UnicodeError:
        raise ValueError(f"has {text!r} in it, which is no host name") from None
    if not _HOST_NAME.fullmatch(name):
        raise ValueError(
            f"has {text!r} in it, which is no host name: write names such as queue.example.com, "
            "without http:// and without a port, and commas between them"
        )
    return name
