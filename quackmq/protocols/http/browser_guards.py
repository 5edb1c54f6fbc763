"""Keep web pages of other sites away from a door that has no password.

A page of any site can make its visitor's browser send requests to this door, at a loopback address
or in the visitor's network. These rules keep such pages out. Programs notice only the first.

- `Host` has to be a name of this broker (`OwnNames`), at whichever address the request came. A page
  is of "the same origin" under a name of its own once its name server says that the name is this
  machine's address (DNS rebinding). The names are those that nobody else can register, and those
  that the settings name.
- A request that says that a page of another origin made it is refused (`Origin`, `Sec-Fetch-Site`).
- A request that changes something and comes from a browser has to show that the user or a page of
  this broker made it. A browser sends neither `Origin` nor, to an address that it does not trust,
  `Sec-Fetch-Site` with an image or a link; so here `Referer` counts too, and its absence.
- No answer has CORS headers, so no other page can read one.

Pure; docs/decisions/http-names.md says why these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Final

#: Of Sec-Fetch-Site: a page of this door itself, or the user's own doing.
_OWN_SITES: Final = frozenset({b"same-origin", b"none"})
#: A name that stands for all names; and what a name begins with that stands for all below it.
_ANY: Final = "*"
_BELOW: Final = "*."
_LOCALHOST: Final = "localhost"
_SCHEMES: Final = (b"http://", b"https://")


class OwnNames:
    """The names by which requests may call this door.

    - `localhost` and names below it, and any IP address: they lead to no server of somebody else;
    - `known`: the machine's own name, the name that the door listens on, the advertised host;
    - `configured`: the setting http_names. `*.example.com` is every name below example.com, and `*`
      is every name;
    - a name without a dot, at addresses that are not loopback. Only a resolver of the local network
      answers for such names, and that network reaches those addresses anyway.
    """

    def __init__(self, configured: Iterable[str] = (), known: Iterable[str] = ()) -> None:
        self._configured = frozenset(_plain(name) for name in configured)
        self._below = tuple(name[1:] for name in self._configured if name.startswith(_BELOW))
        self._known = frozenset(_plain(name) for name in known)

    def serves(self, host: bytes, is_loopback: bool) -> bool:
        """Return whether a request that came to an address of this kind may name this host."""
        name = host_name(host)
        if not name or _ANY in self._configured:
            return True  # no browser leaves the name out
        if "." not in name and not is_loopback:
            return True
        return (
            name == _LOCALHOST
            or name.endswith("." + _LOCALHOST)
            or name in self._known
            or self._is_configured(name)
            or _is_address(name)
        )

    def is_own_origin(self, origin: bytes, host: bytes) -> bool:
        """Return whether a page of this origin is this broker's: the origin is the host that was
        asked, or a configured name without a port, as a proxy in front of the broker has it."""
        origin = origin.lower()
        scheme = next((each for each in _SCHEMES if origin.startswith(each)), None)
        if scheme is None:
            return False
        place = origin.removeprefix(scheme)
        if place == host.lower():
            return True
        return self._is_configured(place.decode("latin-1"))

    def _is_configured(self, name: str) -> bool:
        return name in self._configured or name.endswith(self._below)


def is_foreign_site(sec_fetch_site: bytes) -> bool:
    return sec_fetch_site.lower() not in _OWN_SITES


def is_made_by_another_page(
    headers: Sequence[tuple[bytes, bytes]], host: bytes, names: OwnNames
) -> bool:
    """Return whether a browser sent these headers and nothing in them shows that the user or a page
    of this broker made the request. `Origin` and a foreign `Sec-Fetch-Site` were checked before."""
    found: Mapping[bytes, bytes] = dict(headers)
    if found.get(b"sec-purpose", b"").lower().startswith(b"prefetch"):
        return True  # the user has not asked for it, and perhaps never will
    if b"origin" in found or b"sec-fetch-site" in found:
        return False
    referer = found.get(b"referer")
    if referer is not None:
        return not names.is_own_origin(_origin_of(referer), host)
    return is_browser(found)


def is_browser(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a browser sent these. Some programs call themselves Mozilla too, but no page
    can keep its browser from sending the user's languages."""
    agent = headers.get(b"user-agent", b"").lower()
    return agent.startswith(b"mozilla/") and b"accept-language" in headers


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


def machine_names(hostname: str) -> tuple[str, ...]:
    """The names that a machine of this host name has in its own network: also its first label, and
    that below `local`, which multicast DNS answers and no other name server may."""
    label = hostname.partition(".")[0]
    return tuple(name for name in (hostname, label, f"{label}.local") if label)


def _origin_of(url: bytes) -> bytes:
    """Scheme, host and port of a URL."""
    scheme, _, rest = url.partition(b"://")
    return scheme + b"://" + rest.partition(b"/")[0]


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
