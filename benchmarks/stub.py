"""The least that a Kafka broker in this language on this loop can do: the raw limit of the
listener.

    python -m benchmarks.stub VALUE_BYTES

It reads requests, checks nothing, keeps nothing and answers: a Produce that it is done, a Fetch
with one and the same batch of values of that size, which bears the offset that was asked for. There
is one topic, `bench`, with one partition. What a connection sends of a Produce is received and
dropped where it lies. Answers are prepared, but for their correlation ids. It announces itself on
stdout as `quackmq serve` does.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from typing import Final, cast

import uvloop

from quackmq.cli.broker import process
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.protocols.kafka.codec import fetch, produce
from quackmq.protocols.kafka.codec.writer import write_response
from quackmq.records.batch import Record, stamp
from quackmq.records.codec import encode

TOPIC: Final = "bench"
PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS = 0, 1, 2, 3, 18
#: The highest versions are the ones that librdkafka 2.0 uses of these, none of them flexible; the
#: ranges are as wide as it wants them to be to believe in batches of format 2.
VERSIONS: Final = {
    PRODUCE: (0, 7),
    FETCH: (4, 11),
    LIST_OFFSETS: (1, 2),
    METADATA: (0, 4),
    API_VERSIONS: (0, 3),
}
#: What librdkafka makes of many messages by default.
BATCH_BYTES: Final = 1_000_000
FAR_OFF: Final = 2**40

_HEAD: Final = struct.Struct(">ihhi")
_ANSWER_HEAD: Final = struct.Struct(">ii")
_OFFSET: Final = struct.Struct(">q")


class Stub(asyncio.BufferedProtocol):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._view = memoryview(bytearray(kafka_limits.KAFKA_SCRATCH_BYTES))
        self._end = 0
        #: Bytes still to come of a Produce, and its correlation id.
        self._left = 0
        self._correlation_id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        start = 0
        while True:
            if self._left:
                step = min(self._left, self._end - start)
                self._left -= step
                start += step
                if self._left:
                    break
                self._transport.write(self._answers.produced(self._correlation_id))
            there = self._end - start
            if there < _HEAD.size:
                break
            size, key, version, correlation_id = _HEAD.unpack_from(self._view, start)
            if key == PRODUCE:
                self._left = 4 + size
                self._correlation_id = correlation_id
                continue
            if there < size + 4:
                break
            request = bytes(self._view[start + 4 : start + 4 + size])
            start += size + 4
            self._transport.writelines(self._answers.to(key, version, correlation_id, request))
        self._view[: self._end - start] = self._view[start : self._end]
        self._end -= start


class Answers:
    def __init__(self, value_bytes: int, port: int) -> None:
        value = os.urandom(value_bytes)
        record = Record(0, 1_700_000_000_000, None, value, ())
        record_bytes = len(encode([record] * 100)) // 100
        self._batch = bytearray(encode([record] * (BATCH_BYTES // record_bytes)))
        partition = produce.PartitionResponse(0, 0, 0, 0)
        produced = produce.write_response(7, [produce.TopicResponse(TOPIC, [partition])])
        self._produced_size = len(produced) + 4
        self._produced = bytes(produced)
        data = fetch.PartitionData(0, 0, FAR_OFF, 0, [self._batch], len(self._batch))
        self._fetched = fetch.write_response(11, [fetch.TopicData(TOPIC, [data])])
        self._fetched_size = sum(map(len, self._fetched)) + 4
        self._port = port

    def produced(self, correlation_id: int) -> bytes:
        return _ANSWER_HEAD.pack(self._produced_size, correlation_id) + self._produced

    def to(
        self, key: int, version: int, correlation_id: int, request: bytes
    ) -> list[bytes | bytearray | memoryview]:
        if key == FETCH:
            # Behind the topic's name: length of partitions, partition, leader epoch, offset.
            position = request.index(TOPIC.encode()) + len(TOPIC) + 12
            stamp(self._batch, 0, _OFFSET.unpack_from(request, position)[0], 0)
            return [_ANSWER_HEAD.pack(self._fetched_size, correlation_id), *self._fetched]
        body = write_response(key, version, self._fields(key))
        return [_ANSWER_HEAD.pack(len(body) + 4, correlation_id), body]

    def _fields(self, key: int) -> dict[str, object]:
        if key == API_VERSIONS:
            ranges = [
                {"api_key": api, "min_version": first, "max_version": last}
                for api, (first, last) in VERSIONS.items()
            ]
            return {"error_code": 0, "api_keys": ranges}
        if key == LIST_OFFSETS:
            found = {"partition_index": 0, "error_code": 0, "timestamp": -1, "offset": 0}
            return {"topics": [{"name": TOPIC, "partitions": [found]}]}
        partition = {
            "error_code": 0,
            "partition_index": 0,
            "leader_id": 1,
            "replica_nodes": [1],
            "isr_nodes": [1],
        }
        topic = {"error_code": 0, "name": TOPIC, "is_internal": False, "partitions": [partition]}
        node = {"node_id": 1, "host": "127.0.0.1", "port": self._port, "rack": None}
        return {"brokers": [node], "cluster_id": "stub", "controller_id": 1, "topics": [topic]}


async def serve(value_bytes: int) -> None:
    process.prepare()  # as the broker's own process is
    loop = asyncio.get_running_loop()
    answers: list[Answers] = []
    server = await loop.create_server(lambda: Stub(answers[0]), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    answers.append(Answers(value_bytes, port))
    print(f"kafka listening on 127.0.0.1:{port}\nready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
