"""What a peer of ZeroMQ sends, written out byte by byte."""

from __future__ import annotations

MORE, LONG, COMMAND = 1, 2, 4


def greeting(
    *, major: int = 3, minor: int = 1, mechanism: bytes = b"NULL", first: int = 0xFF
) -> bytes:
    signature = bytes([first, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F])
    return signature + bytes([major, minor]) + mechanism.ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0, *, long: bool = False) -> bytes:
    if long or len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def message(*frames: bytes) -> bytes:
    """Frames as they are; a REQ socket's begin with an empty one."""
    return b"".join(frame(body, MORE) for body in frames[:-1]) + frame(frames[-1])


def request(content: bytes) -> bytes:
    return message(b"", content)


def command(name: bytes, data: bytes = b"") -> bytes:
    return frame(bytes([len(name)]) + name + data, COMMAND)


def ready(socket_type: bytes = b"REQ", **more: bytes) -> bytes:
    properties = {b"Socket-Type": socket_type} | {
        name.encode(): value for name, value in more.items()
    }
    return command(
        b"READY",
        b"".join(
            bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
            for name, value in properties.items()
        ),
    )


HELLO = greeting() + ready()
