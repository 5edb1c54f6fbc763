"""Addresses as people write them."""

from __future__ import annotations

import pytest

from quackmq.cli.broker.address import (
    Address,
    UnixPath,
    parse_address,
    parse_address_or_path,
    parse_advertised_address,
)
from tests.kit.tables import each


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9092", Address("127.0.0.1", 9092)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:9092", Address("::1", 9092)),
        ("broker-1.example:65535", Address("broker-1.example", 65_535)),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@each(
    ("text", "complaint"),
    [
        ("", "is not HOST:PORT"),
        ("localhost", "is not HOST:PORT"),
        ("9092", "is not HOST:PORT"),
        (":9092", "no usable host"),
        ("[]:9092", "no usable host"),
        ("a b:9092", "no usable host"),
        ("::1:9092", "without brackets"),
        ("localhost:", "no port"),
        ("localhost:http", "no port"),
        ("localhost:-1", "no port"),
        ("localhost:65536", "no port"),
        ("localhost:²", "no port"),
    ],
)
def test_what_is_no_address_is_told_so(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_address(text)


def test_the_line_listener_may_have_a_unix_socket() -> None:
    assert parse_address_or_path("unix:run/quack") == UnixPath("run/quack")
    assert str(UnixPath("run/quack")) == "unix:run/quack"
    assert parse_address_or_path("[::1]:7") == Address("::1", 7)
    with pytest.raises(ValueError, match="no path"):
        parse_address_or_path("unix:")
    with pytest.raises(ValueError, match="is not HOST:PORT, nor unix:PATH"):
        parse_address_or_path("nowhere")


def test_nobody_is_told_to_connect_to_port_zero() -> None:
    assert parse_advertised_address("broker.example:9092") == Address("broker.example", 9092)
    with pytest.raises(ValueError, match="port 0"):
        parse_advertised_address("broker.example:0")
