"""Refuse requests that web pages of other sites make: the HTTP listener has no password.

A page of any site can make its visitor's browser send requests to this listener, at a loopback
address or in the visitor's network. These rules refuse those requests. Programs that are not
browsers notice only the first rule.

- `Host` must be a name of this broker (`OwnNames`), on loopback and other addresses. Otherwise an
  attacker could point a name of its own at this machine's address (DNS rebinding). The browser
  would then treat the attacker's page as the same origin. Allowed names are those that nobody else
  can register, and those in the settings.
- A request is refused if its headers say that a page of another origin made it (`Origin`,
  `Sec-Fetch-Site`).
- A request from a browser that changes something must show that the user or a page of this broker
  made it. For an image or a link a browser sends no `Origin`, and to an address that it does not
  trust no `Sec-Fetch-Site`. So `Referer`, or its absence, is checked too.
- No response has CORS headers, so no page of another origin can read a response.

Pure. docs/decisions/http-names.md explains the choice of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Final

#: Values of Sec-Fetch-Site for a page of this broker, or for the user's own action.
_OWN_SITES: Final = frozenset({b"same-origin", b"none"})
#: Matches every name.
_ANY: Final = "*"
#: Before a domain: matches every name below it.
_SUBDOMAINS_OF: Final = "*."
_LOCALHOST: Final = "localhost"
_SCHEMES: Final = (b"http://", b"https://")


class OwnNames:
    """The names that the Host header of a request may contain.

    - `localhost` and names below it, and any IP address: they cannot lead to another party's
      server;
    - `machine`: the machine's own name, the name that the server listens on, the advertised host;
    - `configured`: the setting http_names. `*.example.com` matches every name below example.com,
      and `*` matches every name;
    - a name without a dot, at addresses that are not loopback. Only a resolver of the local network
      answers for these names, and that network can reach those addresses anyway.
    """

    def __init__(self, configured: Iterable[str] = (), machine: Iterable[str] = ()) -> None:
        self._configured = frozenset(_normalise(name) for name in configured)
        self._configured_suffixes = tuple(
            name[1:] for name in self._configured if name.startswith(_SUBDOMAINS_OF)
        )
        self._machine_names = frozenset(_normalise(name) for name in machine)

    def allows_host(self, host: bytes, is_loopback: bool) -> bool:
        """Return whether a request may name this host, given the kind of address it arrived at."""
        name = host_name(host)
        if not name or _ANY in self._configured:
            return True  # a browser always sends the name
        if "." not in name and not is_loopback:
            return True
        return (
            name == _LOCALHOST
            or name.endswith("." + _LOCALHOST)
            or name in self._machine_names
            or self._is_configured(name)
            or _is_address(name)
        )

    def is_own_origin(self, origin: bytes, host: bytes) -> bool:
        """Return whether a page of this origin belongs to this broker. That is so if the origin
        equals the requested host, or is a configured name without a port, as behind a proxy.
        """
        origin = origin.lower()
        scheme = next((prefix for prefix in _SCHEMES if origin.startswith(prefix)), None)
        if scheme is None:
            return False
        host_and_port = origin.removeprefix(scheme)
        if host_and_port == host.lower():
            return True
        return self._is_configured(host_and_port.decode("latin-1"))

    def _is_configured(self, name: str) -> bool:
        return name in self._configured or name.endswith(self._configured_suffixes)


def is_foreign_site(sec_fetch_site: bytes) -> bool:
    """Return whether this value of Sec-Fetch-Site names a page of another site."""
    return sec_fetch_site.lower() not in _OWN_SITES


def may_come_from_another_page(
    headers: Sequence[tuple[bytes, bytes]], host: bytes, names: OwnNames
) -> bool:
    """Return whether a browser sent these headers without a sign that the user or a page of this
    broker made the request. The caller has already checked `Origin` and `Sec-Fetch-Site`.
    """
    header_values: Mapping[bytes, bytes] = dict(headers)
    if header_values.get(b"sec-purpose", b"").lower().startswith(b"prefetch"):
        return True  # the user has not made this request, and may never make it
    if b"origin" in header_values or b"sec-fetch-site" in header_values:
        return False
    referer = header_values.get(b"referer")
    if referer is not None:
        return not names.is_own_origin(_origin_from_url(referer), host)
    return is_browser(header_values)


def is_browser(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a browser sent these headers. Some programs also call themselves Mozilla. But
    a page cannot stop its browser from sending the user's languages.
    """
    agent = headers.get(b"user-agent", b"").lower()
    return agent.startswith(b"mozilla/") and b"accept-language" in headers


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name(host: bytes) -> str:
    """Return the Host header without its port, and an IPv6 address without its brackets."""
    text = host.decode("latin-1").lower().rstrip(".")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, colon, port = text.rpartition(":")
    return (name if colon and port.isdigit() else text).rstrip(".")


def machine_names(hostname: str) -> tuple[str, ...]:
    """Return the names of a machine in its own network: the host name, its first label, and
    LABEL.local. Nobody can register the last two for an attack: the first of them has no domain,
    and only multicast DNS answers for names below `local`."""
    label = hostname.partition(".")[0]
    if not label:
        return ()
    return hostname, label, f"{label}.local"


def _origin_from_url(url: bytes) -> bytes:
    """Return the scheme, host and port of a URL."""
    scheme, _, rest = url.partition(b"://")
    return scheme + b"://" + rest.partition(b"/")[0]


def _normalise(name: str) -> str:
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    """Return whether a host name is an IP address. An IPv6 address may have a zone after "%"."""
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
