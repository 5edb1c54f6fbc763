"""`quackmq clock`: how a broker's clock stands to the wall clock, and `confirm` that that is right.

Over the HTTP door of a running broker. See docs/clock.md for what a confirmation does.
"""

from __future__ import annotations

import argparse
import http.client
import json
from datetime import UTC, datetime
from typing import Any, Final

from quackmq import limits
from quackmq.cli.broker.address import parse_advertised_address
from quackmq.errors import InvalidRequest

DEFAULT_HTTP: Final = "127.0.0.1:8002"

_DAY_S: Final = 24 * 3600
_LATEST_MS: Final = 250_000_000_000_000
_MEANING: Final = {
    "steady": "The two agree.",
    "adjusting": "The broker's clock approaches the wall clock by a tenth of the time that passes.",
    "jumped": "The wall clock jumped. Set it right, or say that it is right: quackmq clock confirm",
    "paused": "Nothing is deleted or expired by age. Set the wall clock right, or say that it is "
    "right: quackmq clock confirm",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "clock",
        help="a broker's clock beside the wall clock",
        description="Show the clock of a running broker, by which everything expires, beside the "
        "wall clock of its machine. With confirm: say that the wall clock is right after it has "
        "jumped, or after the broker was off for long. Exit codes: 0 done, 1 there was nothing to "
        "confirm, or the broker cannot be reached.",
        allow_abbrev=False,
    )
    parser.add_argument("action", nargs="?", choices=["show", "confirm"], default="show")
    parser.add_argument(
        "--passed",
        choices=["yes", "no"],
        help="with confirm: whether the difference is time that passed; default: yes if the "
        "machine was started in between, no if it ran all the time",
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        default=DEFAULT_HTTP,
        help="the broker's HTTP door; default %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    try:
        address = parse_advertised_address(args.http)
    except ValueError as error:
        raise InvalidRequest(f"--http: {args.http!r} {error}") from None
    if args.action == "show":
        if args.passed is not None:
            raise InvalidRequest("--passed is for confirm")
        print(_text(_ask(address.host, address.port, "GET", "/v1/clock")))
        return 0
    body = {} if args.passed is None else {"passed": args.passed == "yes"}
    answer = _ask(address.host, address.port, "POST", "/v1/clock/confirm", body)
    print("Confirmed." if answer["confirmed"] else "There is nothing to confirm.")
    print(_text(answer["clock"]))
    return 0 if answer["confirmed"] else 1


def _ask(host: str, port: int, method: str, path: str, body: Any = None) -> Any:
    """Ask the broker. OSError for a broker that cannot be reached, or that refuses."""
    connection = http.client.HTTPConnection(host, port, timeout=limits.CLIENT_TIMEOUT_MS / 1000)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"no answer from the HTTP door at {host}:{port}: {reason}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise OSError(f"the broker refuses: {answer.get('detail', answer)}")
    return answer


def _text(clock: dict[str, Any]) -> str:
    ahead_s = clock["ahead_ms"] / 1000
    by = f"{abs(ahead_s):.3f} s" if abs(ahead_s) < _DAY_S else f"{abs(ahead_s) / _DAY_S:.1f} days"
    which = "ahead" if ahead_s >= 0 else "behind"
    return "\n".join(
        (
            f"broker's clock  {_shown(clock['time_ms'])}",
            f"wall clock      {_shown(clock['wall_ms'])}, {by} {which}",
            f"status          {clock['status']}",
            _MEANING.get(clock["status"], ""),
        )
    )


def _shown(time_ms: int) -> str:
    if not 0 <= time_ms < _LATEST_MS:
        return f"{time_ms} ms"
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
