"""Streams cut into frames, however they come; headers; and the memory that this takes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.request_header.v1.header import RequestHeader as HeaderV1
from kio.schema.request_header.v2.header import RequestHeader as HeaderV2
from kio.schema.response_header.v0.header import ResponseHeader as ResponseV0
from kio.schema.response_header.v1.header import ResponseHeader as ResponseV1
from kio.static.primitive import i16, i32

from quackmq import limits
from quackmq.errors import ProtocolError
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.protocols.kafka.codec.framing import (
    Frames,
    ReceiveMemory,
    read_header,
    request_body,
    response_head,
)
from quackmq.serving.budgets import ReceiveBudget
from tests.kit import effort
from tests.protocols.kafka.codec.schemas import read_by_kio, written

HEADER_BYTES = 10
PRODUCE = struct.pack(">h", 0)


def framed(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


def payload_of(size: int) -> bytes:
    """A request of Produce's, by its key, with bytes that tell where they belong."""
    return PRODUCE + (bytes(range(256)) * (size // 256 + 1))[: size - len(PRODUCE)]


def fed(frames: Frames, *pieces: bytes) -> list[bytes]:
    return [bytes(frame) for piece in pieces for frame in taken(frames, piece)]


def taken(frames: Frames, data: bytes) -> Iterator[memoryview]:
    """Each frame is good until the next is asked for."""
    left = memoryview(data)
    while left:
        buffer = frames.buffer()
        count = min(len(buffer), len(left))
        buffer[:count] = left[:count]
        left = left[count:]
        frames.received(count)
        while frames.find_frame():
            yield frames.next_frame()
        frames.compact()


def cut(stream: bytes, *positions: int) -> list[bytes]:
    edges = [0, *sorted(positions), len(stream)]
    return [stream[start:end] for start, end in zip(edges, edges[1:], strict=False)]


# --- frames ----------------------------------------------------------------------------------


def test_frames_come_out_of_a_stream_fed_byte_by_byte() -> None:
    payloads = [payload_of(size) for size in (10, 11, 300, 5000)]
    stream = b"".join(map(framed, payloads))
    assert fed(Frames(ReceiveMemory()), *(bytes([byte]) for byte in stream)) == payloads


@settings(max_examples=effort.of(50), deadline=None)
@given(
    st.lists(st.integers(HEADER_BYTES, 70_000), max_size=8),
    st.lists(st.integers(0, 500_000), max_size=8),
)
def test_frames_come_out_of_a_stream_cut_anywhere(sizes: list[int], cuts: list[int]) -> None:
    payloads = [payload_of(size) for size in sizes]
    stream = b"".join(map(framed, payloads))
    pieces = cut(stream, *(position % (len(stream) + 1) for position in cuts))
    assert fed(Frames(ReceiveMemory()), *pieces) == payloads


@pytest.mark.parametrize(
    "size", [kafka_limits.KAFKA_SCRATCH_BYTES - 4, kafka_limits.KAFKA_SCRATCH_BYTES + 1]
)
def test_a_frame_about_as_large_as_the_shared_buffer_comes_whole(size: int) -> None:
    payload = payload_of(size)
    assert fed(Frames(ReceiveMemory()), framed(payload) * 2) == [payload, payload]


def test_connections_that_share_memory_do_not_see_each_others_bytes() -> None:
    memory = ReceiveMemory()
    one, other = Frames(memory), Frames(memory)
    mine, theirs = b"\0" * 10 + b"mine" * 50, b"\0" * 10 + b"theirs" * 50
    got_one: list[bytes] = []
    got_other: list[bytes] = []
    for start in range(0, 4000, 7):
        got_one += fed(one, (framed(mine) * 20)[start : start + 7])
        got_other += fed(other, (framed(theirs) * 20)[start : start + 7])
    assert set(got_one) == {mine}
    assert set(got_other) == {theirs}


def test_frames_not_taken_yet_are_kept() -> None:
    memory = ReceiveMemory()
    frames = Frames(memory)
    payloads = [payload_of(size) for size in (20, 30, 40)]
    stream = b"".join(map(framed, payloads)) + b"\0\0"
    frames.buffer()[: len(stream)] = stream
    frames.received(len(stream))
    kept = []
    for _ in payloads:
        assert frames.find_frame()
        kept.append(bytes(frames.next_frame()))
        frames.compact()
        memory.scratch[:] = bytes(len(memory.scratch))
    assert kept == payloads
    assert not frames.find_frame()
    assert frames.has_bytes


@pytest.mark.parametrize("size", [-1, -(2**31), 0, 9])
def test_a_size_that_no_request_has_is_a_protocol_error(size: int) -> None:
    with pytest.raises(ProtocolError, match="too small for a header"):
        fed(Frames(ReceiveMemory()), struct.pack(">i", size) + bytes(20))


@pytest.mark.parametrize("size", [-1, 0, 9, kafka_limits.KAFKA_PRODUCE_BYTES + 1])
def test_a_size_that_no_request_has_is_told_by_itself(size: int) -> None:
    with pytest.raises(ProtocolError):
        fed(Frames(ReceiveMemory()), struct.pack(">i", size))


@pytest.mark.parametrize(
    ("api_key", "most"),
    [(0, kafka_limits.KAFKA_PRODUCE_BYTES), (3, kafka_limits.KAFKA_REQUEST_BYTES)],
)
def test_a_request_above_the_limit_of_its_kind_is_a_protocol_error(api_key: int, most: int) -> None:
    assert fed(Frames(ReceiveMemory()), struct.pack(">ih", most, api_key)) == []
    with pytest.raises(ProtocolError, match=f"the limit is {most}"):
        fed(Frames(ReceiveMemory()), struct.pack(">ih", most + 1, api_key))


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n", b"SSH-2.0-OpenSSH", b"\x16\x03\x01\2"])
def test_a_peer_of_another_protocol_is_told_by_its_first_bytes(greeting: bytes) -> None:
    with pytest.raises(ProtocolError):
        fed(Frames(ReceiveMemory()), greeting + bytes(20))


# --- memory ----------------------------------------------------------------------------------


def test_a_size_alone_takes_no_memory() -> None:
    frames = Frames(ReceiveMemory())
    assert fed(frames, struct.pack(">ih", kafka_limits.KAFKA_PRODUCE_BYTES, 0)) == []
    assert len(frames.buffer()) <= 4 * limits.KIB


def test_memory_grows_with_what_has_come() -> None:
    frames = Frames(ReceiveMemory())
    claimed = 8 * limits.MIB
    stream = framed(payload_of(claimed))
    sent = 10
    assert fed(frames, stream[:sent]) == []
    while sent < len(stream) - 1:
        count = min(len(frames.buffer()), len(stream) - 1 - sent)
        # Twice, because buffers are powers of two.
        assert sent + count <= max(4 * limits.KIB, 2 * kafka_limits.KAFKA_RECEIVE_GROWTH * sent)
        assert fed(frames, stream[sent : sent + count]) == []
        sent += count
    assert fed(frames, stream[-1:]) == [stream[4:]]


def test_a_large_request_waits_until_others_are_done_with_their_memory() -> None:
    released: list[str] = []
    memory = ReceiveMemory(ReceiveBudget(limits.MIB, lambda: released.append("released")))
    first, second = Frames(memory), Frames(memory)
    stream = framed(payload_of(600 * limits.KIB))
    fed(first, stream[:-1])
    fed(second, stream[: 100 * limits.KIB])
    assert (first.reserve_memory(), second.reserve_memory()) == (True, False)
    assert fed(first, stream[-1:]) == [stream[4:]]
    assert released == ["released"]
    assert second.reserve_memory()
    second.close()
    assert first.reserve_memory()


def test_who_claims_much_and_says_little_needs_no_memory_of_anybody() -> None:
    memory = ReceiveMemory(ReceiveBudget(0))
    frames = Frames(memory)
    stream = framed(payload_of(600 * limits.KIB))
    most = kafka_limits.KAFKA_UNRESERVED_BYTES
    for sent in range(0, most - 1000, 1000):
        fed(frames, stream[sent : sent + 1000])
        assert frames.reserve_memory()
        assert 0 < len(frames.buffer()) <= most
    fed(frames, stream[sent + 1000 : most])
    assert not frames.reserve_memory()


def test_how_much_has_come_is_told_of_what_memory_is_held_for() -> None:
    frames = Frames(ReceiveMemory())
    stream = framed(payload_of(limits.MIB - 4))
    fed(frames, stream[:1000])
    shares = [frames.received_share]
    fed(frames, stream[1000 : limits.MIB // 2])
    shares.append(frames.received_share)
    assert fed(frames, stream[limits.MIB // 2 :]) == [stream[4:]]
    shares.append(frames.received_share)
    assert shares == [None, 0.5, None]


def test_a_connection_that_goes_gives_its_memory_back() -> None:
    memory = ReceiveMemory(ReceiveBudget(limits.MIB))
    for _ in range(10):
        frames = Frames(memory)
        fed(frames, framed(payload_of(limits.MIB - 4))[:-1])
        assert frames.reserve_memory()
        frames.close()
        frames.close()


def test_buffers_are_used_again() -> None:
    memory = ReceiveMemory()
    stream = framed(payload_of(limits.MIB - 4))
    frames = Frames(memory)
    seen = set()
    for _ in range(5):
        fed(frames, stream[:-1])
        seen.add(id(frames.buffer().obj))
        assert fed(frames, stream[-1:]) == [stream[4:]]
    assert len(seen) == 1


def test_a_large_frame_stays_good_and_a_small_one_is_not_to_be_kept() -> None:
    frames = Frames(ReceiveMemory())
    payloads = [payload_of(size) for size in (300_000, 1000, 300_000, 400_000)]
    kept = []
    for piece in cut(b"".join(map(framed, payloads)), 100_000, 400_000, 700_000):
        for frame in taken(frames, piece):
            if frames.owns_last_frame:
                kept.append(frame)
    assert kept == [payload for payload in payloads if len(payload) > 1000]
    frames.close()


def test_small_requests_need_no_admission() -> None:
    memory = ReceiveMemory(ReceiveBudget(0))
    frames = Frames(memory)
    fed(frames, framed(payload_of(kafka_limits.KAFKA_UNRESERVED_BYTES - 4))[:100])
    assert frames.reserve_memory()


# --- headers ---------------------------------------------------------------------------------


@given(
    st.integers(0, 100), st.integers(0, 20), st.integers(-(2**31), 2**31 - 1), st.none() | st.text()
)
def test_headers_are_read_as_kio_writes_them(
    api_key: int, version: int, correlation_id: int, client_id: str | None
) -> None:
    for schema, flexible in ((HeaderV1, False), (HeaderV2, True)):
        written_header = written(
            schema(
                request_api_key=i16.parse(api_key),
                request_api_version=i16.parse(version),
                correlation_id=i32.parse(correlation_id),
                client_id=client_id,
            )
        )
        frame = memoryview(written_header + b"body")
        header = read_header(frame)
        assert header[:3] == (api_key, version, correlation_id)
        assert header.client_id == (client_id or "").encode()
        assert bytes(request_body(frame, header, flexible)) == b"body"


def test_a_header_cut_off_anywhere_is_a_protocol_error() -> None:
    whole = struct.pack(">hhih", 3, 9, 1, 4) + b"name" + b"\x01\x00\x02ab"
    for size in range(len(whole)):
        frame = memoryview(whole[:size])
        with pytest.raises(ProtocolError):
            request_body(frame, read_header(frame), is_flexible=True)
    assert (
        bytes(request_body(memoryview(whole), read_header(memoryview(whole)), is_flexible=True))
        == b""
    )


@pytest.mark.parametrize(("schema", "flexible"), [(ResponseV0, False), (ResponseV1, True)])
def test_response_heads_are_as_kio_reads_them(schema: type, flexible: bool) -> None:
    head = response_head(100, -5, flexible)
    size = int.from_bytes(head[:4], "big")
    assert size == len(head) - 4 + 100
    assert read_by_kio(schema, head[4:]).correlation_id == -5
