"""What a browser must not be made to ask for.

A page of any site can make its visitor's browser send requests to 127.0.0.1, where this door
listens without a password. Three rules keep such pages out; programs notice none of them.

- A request that says that it comes from another origin is refused (`Origin`, `Sec-Fetch-Site`): so
  a page can neither publish nor consume.
- One that came to a loopback address must not name a host of somebody's domain. By such a name a
  page is of "the same origin" once its own name server says that the name is 127.0.0.1 (DNS
  rebinding). Addresses, names without a dot and what ends in `.localhost` are nobody's domain.
- No answer has CORS headers, so no other page can read one.
"""

from __future__ import annotations

from ipaddress import ip_address

#: Of Sec-Fetch-Site: a page of this door itself, or the user's own doing.
_OWN_SITES = frozenset({b"same-origin", b"none"})


def is_foreign_origin(origin: bytes, host: bytes) -> bool:
    """Whether a request with these headers was made by a page of another place."""
    return origin.lower() not in (b"http://" + host.lower(), b"https://" + host.lower())


def is_foreign_site(sec_fetch_site: bytes) -> bool:
    return sec_fetch_site.lower() not in _OWN_SITES


def is_foreign_host(host: bytes, own_host: str) -> bool:
    """Whether a request that came to a loopback address names a host that may be anybody's.
    `own_host` is what the door was told to listen on."""
    name = host_name(host)
    if "." not in name or name.endswith(".localhost") or name == own_host.lower():
        return False
    return not _is_address(name)


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name(host: bytes) -> str:
    """The header Host without its port, and an address without its brackets."""
    text = host.decode("latin-1").lower().rstrip(".")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, colon, port = text.rpartition(":")
    return (name if colon and port.isdigit() else text).rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
