"""Requests of a command to the HTTP API of a running broker."""

from __future__ import annotations

import argparse
import http.client
import json
from typing import Any, Final

from quackmq import limits
from quackmq.cli.broker.address import Address, parse_advertised_address
from quackmq.errors import InvalidRequest

DEFAULT_HTTP: Final = "127.0.0.1:8002"


def add_http_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --http, the address of the HTTP listener."""
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        default=DEFAULT_HTTP,
        help="the HTTP address of the broker; default %(default)s",
    )


def parse_http_option(args: argparse.Namespace) -> Address:
    """Return the address of the option --http. Raises InvalidRequest."""
    try:
        return parse_advertised_address(args.http)
    except ValueError as error:
        raise InvalidRequest(f"--http: {args.http!r} {error}") from None


def request(address: Address, method: str, path: str, body: Any = None) -> Any:
    """Send a request to the broker and return its answer, empty if it has no content. Raises
    OSError if the broker cannot be reached or refuses the request."""
    host, port = address
    connection = http.client.HTTPConnection(host, port, timeout=limits.CLIENT_TIMEOUT_MS / 1000)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        has_no_content = response.status == http.client.NO_CONTENT
        answer: Any = {} if has_no_content else json.loads(content)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"no answer from the broker's HTTP address {address}: {reason}; start a broker with "
            "`quackmq serve`, or name its HTTP address with --http HOST:PORT"
        ) from error
    finally:
        connection.close()
    if response.status >= http.client.BAD_REQUEST:
        raise OSError(f"the broker refused the request: {answer.get('detail', answer)}")
    return answer
