"""Parse addresses: HOST:PORT, [IPV6]:PORT, unix:PATH, and lists of host names. Pure: no name is
resolved."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

UNIX_PREFIX = "unix:"
LAST_PORT = 65_535
_HOST_NAME: Final = re.compile(r"(\*\.)?([a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")


class Address(NamedTuple):
    """A TCP address to listen on or to advertise. Port 0 requests a free port from the system."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UnixPath(NamedTuple):
    path: str

    def __str__(self) -> str:
        return UNIX_PREFIX + self.path


def parse_address(text: str) -> Address:
    """Parse HOST:PORT. Raises ValueError with a phrase that continues "the value …"."""
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
    """Parse an address that clients connect to, which must have a port other than 0."""
    address = parse_address(text)
    if address.port == 0:
        raise ValueError("has port 0, which clients cannot connect to")
    return address


def parse_address_or_path(text: str) -> Address | UnixPath:
    """Parse HOST:PORT or unix:PATH. Raises ValueError with a phrase that continues "the value
    …"."""
    if ":" not in text:
        raise ValueError("is not HOST:PORT, nor unix:PATH")
    if not text.startswith(UNIX_PREFIX):
        return parse_address(text)
    path = text.removeprefix(UNIX_PREFIX)
    if not path:
        raise ValueError("has no path after unix:")
    return UnixPath(path)


def parse_host_names(text: str) -> tuple[str, ...]:
    """Parse comma-separated host names; return them in lower case and in DNS encoding. `*`
    matches any name, and `*.NAME` every name below NAME. Raises ValueError with a phrase that
    continues "the value …"."""
    names = [_check_host_name(part.strip()) for part in text.split(",") if part.strip()]
    return tuple(dict.fromkeys(names))


def _check_host_name(text: str) -> str:
    """Check one host name; return it in lower case, without a final dot and in DNS encoding. Raises
    ValueError."""
    name = text.rstrip(".").lower()
    if name == "*":
        return name
    try:
        name = name.encode("idna").decode() if not name.isascii() else name
    except UnicodeError:
        raise ValueError(f"contains {text!r}, which is not a host name") from None
    if not _HOST_NAME.fullmatch(name):
        raise ValueError(
            f"contains {text!r}, which is not a host name: write names like queue.example.com, "
            "separated by commas, without http:// and without a port"
        )
    return name
