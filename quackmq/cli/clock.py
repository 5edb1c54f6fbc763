"""`quackmq clock`: compare a broker's clock with the wall clock, and confirm that the wall clock is
right.

Uses the HTTP API of a running broker. docs/clock.md explains what a confirmation does.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import Any, Final

from quackmq.cli.broker.requests import add_http_option, parse_http_option, request
from quackmq.errors import InvalidRequest

_DAY_S: Final = 24 * 3600
#: From here on (the year 9892) a time is printed as a number: `datetime` ends with the year 9999.
_LATEST_MS: Final = 250_000_000_000_000
_ADVICE: Final = {
    "steady": "The two agree.",
    "adjusting": "The broker's clock approaches the wall clock by a tenth of the time that passes.",
    "jumped": "The wall clock jumped. Correct it, or confirm that it is right: "
    "quackmq clock confirm",
    "paused": "Nothing is deleted or expired by age. Correct the wall clock, or confirm that it is "
    "right: quackmq clock confirm",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "clock",
        help="compare a broker's clock with the wall clock",
        description="Show the clock of a running broker, which decides when data expires, and the "
        "wall clock of its machine. With confirm: confirm that the wall clock is right, after it "
        "jumped or after the broker was off for a long time. Exit codes: 0 done, 1 there was "
        "nothing to confirm, or the broker cannot be reached.",
        allow_abbrev=False,
    )
    parser.add_argument("action", nargs="?", choices=["show", "confirm"], default="show")
    parser.add_argument(
        "--passed",
        choices=["yes", "no"],
        help="with confirm: whether the difference is time that really passed; default: yes if the "
        "machine was booted in between, no if it ran all the time",
    )
    add_http_option(parser)


def run(args: argparse.Namespace) -> int:
    """Show or confirm the clock; return 0, or 1 if there was nothing to confirm. Raises
    InvalidRequest for invalid options and OSError if the broker cannot be reached."""
    address = parse_http_option(args)
    if args.action == "show":
        if args.passed is not None:
            raise InvalidRequest("--passed needs the action confirm")
        print(_describe(request(address, "GET", "/v1/clock")))
        return 0
    body = {} if args.passed is None else {"passed": args.passed == "yes"}
    response = request(address, "POST", "/v1/clock/confirm", body)
    print("Confirmed." if response["confirmed"] else "There is nothing to confirm.")
    print(_describe(response["clock"]))
    return 0 if response["confirmed"] else 1


def _describe(clock: dict[str, Any]) -> str:
    """Return the lines that show both clocks, their difference, the status and what to do."""
    ahead_s = clock["ahead_ms"] / 1000
    difference = (
        f"{abs(ahead_s):.3f} s" if abs(ahead_s) < _DAY_S else f"{abs(ahead_s) / _DAY_S:.1f} days"
    )
    direction = "ahead" if ahead_s >= 0 else "behind"
    return "\n".join(
        (
            f"broker's clock  {_format_time(clock['time_ms'])}",
            f"wall clock      {_format_time(clock['wall_ms'])}, {difference} {direction}",
            f"status          {clock['status']}",
            _ADVICE.get(clock["status"], ""),
        )
    )


def _format_time(time_ms: int) -> str:
    if not 0 <= time_ms < _LATEST_MS:
        return f"{time_ms} ms"
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
