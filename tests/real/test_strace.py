"""strace's lines, read as calls: whole ones, ones that others overtook, ones that failed."""

from __future__ import annotations

from tests.real.strace import Call, parse


def hexed(text: str) -> str:
    """As strace -xx writes strings and paths."""
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


SLOT, SOCKET = hexed("/data/journal/0"), hexed("socket:[17]")
QUACK, WADDLE = hexed("quack"), hexed("waddle")


def test_a_call_has_its_target_its_bytes_and_its_place() -> None:
    [call] = parse([f'7 pwrite64(16<{SLOT}>, "{QUACK}", 5, 512) = 5\n'])
    assert call == Call("pwrite64", "/data/journal/0", 0, 0, b"quack", 512)


def test_of_a_short_write_only_what_was_written_counts() -> None:
    buffers = f'[{{iov_base="{QUACK}", iov_len=5}}, {{iov_base="{WADDLE}", iov_len=6}}]'
    [call] = parse([f"7 pwritev(16<{SLOT}>, {buffers}, 2, 0) = 8\n"])
    assert (call.data, call.position) == (b"quackwad", 0)


def test_a_call_that_others_overtook_began_and_ended_on_lines_of_their_own() -> None:
    lines = [
        f"7 fdatasync(16<{SLOT}> <unfinished ...>\n",
        f"8 read(17<{SOCKET}>,  <unfinished ...>\n",
        f'9 write(17<{SOCKET}>, "{QUACK}", 5) = 5\n',
        "7 <... fdatasync resumed>) = 0\n",
        f'8 <... read resumed>"{WADDLE}", 262144) = 6\n',
    ]
    assert list(parse(lines)) == [
        Call("write", "socket:[17]", 2, 2, b"quack"),
        Call("fdatasync", "/data/journal/0", 0, 3),
        Call("read", "socket:[17]", 1, 4, b"waddle"),
    ]


def test_a_sync_that_the_system_does_on_its_own_lasts_until_it_says_so() -> None:
    asked = f"[{{aio_data=0, aio_lio_opcode=IOCB_CMD_FDSYNC, aio_fildes=16<{SLOT}>}}]"
    heard = "[{data=0, obj=0x7f51, res=0, res2=0}], {tv_sec=0, tv_nsec=0}"
    lines = [
        f"7 io_submit(0x7f53, 1, {asked} <unfinished ...>\n",
        f'9 write(17<{SOCKET}>, "{QUACK}", 5) = 5\n',
        "7 <... io_submit resumed>) = 1\n",
        f"7 io_getevents(0x7f53, 1, 1, {heard}) = 1\n",
        f"7 io_submit(0x7f53, 1, {asked}) = 1\n",
        f"7 io_getevents(0x7f53, 1, 1, {heard.replace('res=0', 'res=-5')}) = 1\n",
    ]
    assert list(parse(lines)) == [
        Call("write", "socket:[17]", 1, 1, b"quack"),
        Call("fdatasync", "/data/journal/0", 0, 3),
    ]


def test_a_name_is_made_by_creating_a_file_or_a_directory() -> None:
    lines = [
        f'7 openat(AT_FDCWD<{hexed("/")}>, "{SLOT}", O_RDWR|O_CREAT, 0640) = 16<{SLOT}>\n',
        f'7 openat(AT_FDCWD, "{SLOT}", O_RDWR|O_CLOEXEC) = 16<{SLOT}>\n',
        f'7 mkdir("{hexed("/data/log")}", 0750) = 0\n',
    ]
    assert [(call.target, call.creates) for call in parse(lines)] == [
        ("/data/journal/0", True),
        ("/data/journal/0", False),
        ("/data/log", True),
    ]


def test_calls_that_failed_and_lines_that_are_no_calls_are_left_out() -> None:
    lines = [
        f"7 fdatasync(16<{SLOT}>) = -1 EIO (Input/output error)\n",
        f"7 read(17<{SOCKET}>, 0x559a, 262144) = -1 EAGAIN (Resource temporarily unavailable)\n",
        "7 --- SIGTERM {si_signo=SIGTERM, si_code=SI_USER} ---\n",
        "7 +++ exited with 0 +++\n",
    ]
    assert list(parse(lines)) == []
