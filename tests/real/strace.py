"""What strace wrote down, as values: which call began and ended when, on what, with which bytes.

`strace` lists calls in the order in which it met them, over all threads: a call that others
overtake has a line for its beginning (`<unfinished ...>`) and one for its end (`resumed`). The
number of a line is all the time that is needed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

WRITES: Final = ("pwrite64", "pwritev")
SYNCS: Final = ("fdatasync", "fsync")
NAMES: Final = ("openat", "mkdir")
RECEIVES: Final = ("read", "readv", "recvfrom", "recvmsg")
SENDS: Final = ("write", "writev", "sendto", "sendmsg")
#: Enough for the longest write; a string that was cut is an error.
STRING_BYTES: Final = 2_000_000

_WHOLE: Final = re.compile(r"(?P<pid>\d+) +(?P<name>\w+)\((?P<text>.*)\) += (?P<result>.+)")
_BEGUN: Final = re.compile(r"(?P<pid>\d+) +(?P<name>\w+)\((?P<text>.*) <unfinished \.\.\.>")
_ENDED: Final = re.compile(
    r"(?P<pid>\d+) +<\.\.\. (?P<name>\w+) resumed>(?P<text>.*)\) += (?P<result>.+)"
)
_DESCRIPTOR: Final = re.compile(r"\d+<([^>]*)>")
_STRING: Final = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_POSITION: Final = re.compile(r", (\d+)$")
_SOCKET: Final = b"socket:".hex()


class Call(NamedTuple):
    """One call that succeeded. `target` is the path, or the socket, that it was about."""

    name: str
    target: str
    began: int
    ended: int
    #: Written, sent or received; as much of it as the call said.
    data: bytes = b""
    #: Of a write, where in the file.
    position: int = -1
    #: Of openat and mkdir: it may have made the name.
    creates: bool = False


def command(output: Path) -> list[str]:
    """What to put before a command to have it traced. It stays our child: the tracer does not."""
    traced = ",".join((*WRITES, *SYNCS, *NAMES, *RECEIVES, *SENDS))
    options = f"-D -f -y -xx -s {STRING_BYTES} -e trace={traced}"
    return ["strace", *options.split(), "-o", str(output)]


def calls(output: Path) -> list[Call]:
    """In the order of their ends. Of reads and sends, those on sockets only."""
    with output.open() as lines:
        return list(parse(lines))


def parse(lines: Iterable[str]) -> Iterator[Call]:
    begun: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines):
        line = line.rstrip("\n")
        if found := _BEGUN.fullmatch(line):
            begun[found["pid"]] = number, found["text"]
        elif found := _ENDED.fullmatch(line):
            began, text = begun.pop(found["pid"])
            yield from _call(found["name"], text + found["text"], found["result"], began, number)
        elif found := _WHOLE.fullmatch(line):
            yield from _call(found["name"], found["text"], found["result"], number, number)


def _call(name: str, text: str, result: str, began: int, ended: int) -> Iterator[Call]:
    if result.startswith("-1 "):
        return
    if name in NAMES:
        [path] = _strings(text)
        creates = name == "mkdir" or "O_CREAT" in text
        yield Call(name, path.decode(), began, ended, creates=creates)
        return
    on = _DESCRIPTOR.match(text)
    assert on is not None, f"{name} on no descriptor: {text[:80]}"
    target = on[1].replace("\\x", "")
    if name in SYNCS:
        yield Call(name, bytes.fromhex(target).decode(), began, ended)
    elif name in WRITES or target.startswith(_SOCKET):
        data = b"".join(_strings(text))[: int(result)]
        position = _POSITION.search(text) if name in WRITES else None
        at = -1 if position is None else int(position[1])
        yield Call(name, bytes.fromhex(target).decode(), began, ended, data, at)


def _strings(text: str) -> Iterator[bytes]:
    for content, cut in _STRING.findall(text):
        assert not cut, f"a string of more than {STRING_BYTES} bytes was cut"
        yield bytes.fromhex(content.replace("\\x", ""))
