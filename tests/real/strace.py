"""What strace wrote down, as values: which call began and ended when, on what, with which bytes.

`strace` lists calls in the order in which it met them, over all threads: a call that others
overtake has a line for its beginning (`<unfinished ...>`) and one for its end (`resumed`). The
number of a line is all the time that is needed here. A sync that the system was asked to do on its
own (io_submit) lasts until the system was heard to say that it is done (io_getevents).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

WRITES: Final = ("pwrite64", "pwritev")
SYNCS: Final = ("fdatasync", "fsync")
ASKS: Final = "io_submit"
HEARS: Final = "io_getevents"
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
_ASKED: Final = re.compile(
    r"(0x[0-9a-f]+), 1, \[\{aio_data=0, aio_lio_opcode=IOCB_CMD_FDSYNC, aio_fildes=(\d+<[^>]*>)"
)
_HEARD: Final = re.compile(r"(0x[0-9a-f]+), 1, 1, \[\{data=0, obj=0x[0-9a-f]+, res=(-?\d+)")
_SOCKET: Final = "socket:"


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
    traced = ",".join((*WRITES, *SYNCS, ASKS, HEARS, *NAMES, *RECEIVES, *SENDS))
    options = f"-D -f -y -xx -s {STRING_BYTES} -e trace={traced}"
    return ["strace", *options.split(), "-o", str(output)]


def calls(output: Path) -> list[Call]:
    """In the order of their ends. Of reads and sends, those on sockets only."""
    with output.open() as lines:
        return list(parse(lines))


def parse(lines: Iterable[str]) -> Iterator[Call]:
    asked: dict[str, Call] = {}
    for call in _calls(lines):
        if call.name == ASKS:
            found = _ASKED.match(call.target)
            assert found is not None, f"something else than a sync: {call.target[:200]}"
            asked[found[1]] = Call("fdatasync", _path(found[2]), call.began, call.ended)
        elif call.name == HEARS:
            found = _HEARD.match(call.target)
            assert found is not None, f"something else than one answer: {call.target[:200]}"
            sync = asked.pop(found[1])
            if found[2] == "0":
                yield sync._replace(ended=call.ended)
        else:
            yield call


def _calls(lines: Iterable[str]) -> Iterator[Call]:
    """Of those about syncs that the system does on its own, `target` is the whole text."""
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
    if name in (ASKS, HEARS):
        yield Call(name, text, began, ended)
        return
    if name in NAMES:
        [path] = _strings(text)
        creates = name == "mkdir" or "O_CREAT" in text
        yield Call(name, path.decode(), began, ended, creates=creates)
        return
    target = _path(text)
    if name in SYNCS:
        yield Call(name, target, began, ended)
    elif name in WRITES or target.startswith(_SOCKET):
        data = b"".join(_strings(text))[: int(result)]
        position = _POSITION.search(text) if name in WRITES else None
        at = -1 if position is None else int(position[1])
        yield Call(name, target, began, ended, data, at)


def _path(text: str) -> str:
    """What the descriptor that a text begins with is open on."""
    on = _DESCRIPTOR.match(text)
    assert on is not None, f"no descriptor: {text[:80]}"
    return bytes.fromhex(on[1].replace("\\x", "")).decode()


def _strings(text: str) -> Iterator[bytes]:
    for content, cut in _STRING.findall(text):
        assert not cut, f"a string of more than {STRING_BYTES} bytes was cut"
        yield bytes.fromhex(content.replace("\\x", ""))
