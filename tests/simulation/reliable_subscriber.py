"""A subscriber of the proxy that acknowledges what it gets, as a model of three connections.

It says `hello`, gets first deliveries from the XPUB socket and all others as `data` requests at its
own REP socket, and acknowledges them there or at the proxy's REP socket. It forgets, answers late
or wrongly, hangs up, changes its address, says `goodbye` and comes back. It checks:

- Every message that was published after its `hello` comes, with the content that is in the log,
  and none that was acknowledged to its publisher before.
- A message that the broker knows to be done does not come again: not while the broker lives, not
  after it has closed, and not after a crash, except for acknowledgements of the last moment.
- All messages before a low-water mark were acknowledged.
- A message comes from the XPUB socket once, in the order of its partition, without gaps while the
  socket keeps up.
- After `not_yet`, a message does not come again before the lease has ended.
- After `goodbye`, no message comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from quackmq.client.zeromq.received_offsets import ProcessedOffsets
from quackmq.errors import QuackError
from quackmq.model.subscription import RecordPosition, parse_message_id
from quackmq.protocols.zmq.codec.proxy_language import (
    Data,
    Goodbye,
    Hello,
    Received,
    Welcome,
    client_subscription,
    encode_data_received,
    encode_not_yet,
    ids_subscription,
    parse_data,
    parse_ids_subscription,
)
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop
from tests.simulation.protocol_clients import ProtocolClient, read_nothing
from tests.simulation.proxy_peers import (
    CallbackListener,
    Command,
    ProxyServers,
    ZmtpPeer,
    note_refusal,
)

LEASE_MS: Final = 1_000
#: Acknowledgements are durable within this time; the broker writes them every 50 ms.
_FLUSH_SECONDS: Final = 2.0
#: What was on its way when `goodbye` was answered has arrived after this time, or never arrives.
_ON_ITS_WAY_SECONDS: Final = 0.1
#: The lease is measured in whole milliseconds.
_ROUNDING_SECONDS: Final = 0.002


@dataclass
class Account:
    """What a client knows about its subscription to one topic, over all lives of the broker."""

    client: str
    topic: str
    #: Whether a `hello` was answered, and whether a `goodbye` was sent and not answered yet.
    is_subscribed: bool = False
    is_leaving: bool = False
    left_at: float | None = None
    #: By partition: no message before these offsets may come; every one from those on must.
    may_come_from: dict[int, int] | None = None
    must_come_from: dict[int, int] | None = None
    contents: dict[RecordPosition, bytes] = field(default_factory=dict)
    id_by_position: dict[RecordPosition, str] = field(default_factory=dict)
    #: Received, and not processed yet.
    in_hand: dict[RecordPosition, None] = field(default_factory=dict)
    #: Processed; the broker was told, or the message to it was lost.
    processed: set[RecordPosition] = field(default_factory=set)
    #: The broker has said that it knows, in this life, and when.
    noted: dict[RecordPosition, float] = field(default_factory=dict)
    #: It came again after that, once: it was on its way.
    came_after_note: set[RecordPosition] = field(default_factory=set)
    #: The broker has read the answer to `data`, in this life.
    answers_read: set[RecordPosition] = field(default_factory=set)
    #: The broker knows from an earlier life.
    durable: set[RecordPosition] = field(default_factory=set)
    #: The last offset from the XPUB socket, by partition.
    last_from_xpub: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        #: What the client library would drop as a repeat.
        self.repeats = ProcessedOffsets(None, self.client)

    def broker_restarted(self, now: float, *, is_closed: bool, has_failed: bool) -> None:
        """The last life has ended: by closing, or by a crash, perhaps with a failing disk."""
        if not has_failed:
            self.durable |= {
                position
                for position, noted_at in self.noted.items()
                if is_closed or now - noted_at > _FLUSH_SECONDS
            }
        self.noted.clear()
        self.came_after_note.clear()
        self.answers_read.clear()

    def accept(self, message_id: str, content: bytes) -> RecordPosition:
        """Check that a message is always the same under its id."""
        _, position = parse_message_id(message_id)
        known = self.contents.setdefault(position, content)
        known_id = self.id_by_position.setdefault(position, message_id)
        if (known, known_id) != (content, message_id):
            raise Violation(f"{self.client}: {position} of {self.topic} has changed")
        return position

    def process(self, position: RecordPosition) -> None:
        """Process a message; from now on the client library knows repeats of it."""
        topic_id, _ = parse_message_id(self.id_by_position[position])
        self.repeats.add(topic_id, position)
        self.processed.add(position)

    def is_repeat(self, position: RecordPosition) -> bool:
        topic_id, _ = parse_message_id(self.id_by_position[position])
        return self.repeats.has(topic_id, position)

    def note_marks(self, marks: tuple[str, ...]) -> None:
        """Check low-water marks, and use them as the client library does."""
        for mark_id in marks:
            topic_id, mark = parse_message_id(mark_id)
            first = (self.must_come_from or {}).get(mark.partition, mark.offset)
            for offset in range(first, mark.offset):
                if RecordPosition(mark.partition, offset) not in self.processed:
                    raise Violation(
                        f"{self.client} has not processed {offset} of {self.topic}, and the broker "
                        f"has done everything before {mark.offset}"
                    )
            self.repeats.add_before(topic_id, mark)

    def check_data(self, position: RecordPosition, now: float) -> None:
        """Check that a message may come as `data` now."""
        if self.left_at is not None and now > self.left_at + _ON_ITS_WAY_SECONDS:
            raise Violation(f"{self.client} got {position} of {self.topic} after its goodbye")
        first = (self.may_come_from or {}).get(position.partition, 0)
        if position.offset < first:
            raise Violation(f"{self.client} got {position} of {self.topic} from before its hello")
        reasons = {
            "an earlier broker knew that it is done": self.durable,
            "the broker has read the answer": self.answers_read,
            "its acknowledgement was noted, and it came again before": self.came_after_note,
        }
        for reason, positions in reasons.items():
            if position in positions:
                raise Violation(f"{self.client} got {position} of {self.topic} again: {reason}")
        if position in self.noted:
            self.came_after_note.add(position)

    def missing(self, ends: dict[int, int]) -> set[RecordPosition]:
        """Return the messages before `ends` that must come and were not processed."""
        return {
            RecordPosition(partition, offset)
            for partition, first in (self.must_come_from or {}).items()
            for offset in range(first, ends[partition])
        } - self.processed


class ReliableSubscriber(ProtocolClient[ZmtpPeer]):
    """The client's REQ socket. It owns the accounts and the REP socket."""

    server = "proxy"
    #: The servers of this life.
    servers: ProxyServers
    _loop: NetworkLoop

    def __init__(self, name: str, free_ports: Iterator[int], *topics: str) -> None:
        super().__init__(name, topics[0])
        self.accounts = {topic: Account(name, topic) for topic in topics}
        self.listener = CallbackListener(self._serve, free_ports)
        #: Whether the proxy knows the present address.
        self._is_address_known = False
        self.is_obedient = False

    def broker_restarted(self, now: float, *, is_closed: bool, has_failed: bool) -> None:
        self.listener.forget()
        for account in self.accounts.values():
            account.broker_restarted(now, is_closed=is_closed, has_failed=has_failed)

    async def begin(self, servers: ProxyServers, loop: NetworkLoop) -> None:
        """Begin a life. Usually the client listens where it has listened before."""
        self.servers, self._loop = servers, loop
        await self.listener.open()

    def has_everything(self, ends_by_topic: dict[str, dict[int, int]]) -> bool:
        return all(
            account.is_subscribed
            and self._is_address_known
            and not account.in_hand
            and not account.missing(ends_by_topic[topic])
            for topic, account in self.accounts.items()
        )

    def describe(self, ends_by_topic: dict[str, dict[int, int]]) -> str:
        """Say what it waits for, for a message."""
        return ", ".join(
            f"{topic}: subscribed {account.is_subscribed}, in hand {list(account.in_hand)}, "
            f"missing {sorted(account.missing(ends_by_topic[topic]))}"
            for topic, account in self.accounts.items()
        )

    # --- the REQ socket -------------------------------------------------------------------------

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ZmtpPeer:
        return await ZmtpPeer(reader, writer).introduce(b"REQ")

    async def _step(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        account = loop.source.choice(list(self.accounts.values()))
        fate = 1.0 if self.is_obedient else loop.source.random()
        try:
            if account.is_leaving or (account.is_subscribed and fate < 0.03):
                await self._say_goodbye(peer, account, loop)
            elif not account.is_subscribed or not self._is_address_known or fate < 0.1:
                await self._say_hello(peer, account, loop)
            elif account.in_hand:
                await self._acknowledge(peer, account, loop)
        except QuackError as error:
            note_refusal(error, loop)

    async def _say_hello(self, peer: ZmtpPeer, account: Account, loop: NetworkLoop) -> None:
        if loop.source.random() < 0.5 and not self.is_obedient:
            await self.listener.open(is_new_port=True)
            self._is_address_known = False
            loop.counts["clients that changed their address"] += 1
        if account.may_come_from is None:
            account.may_come_from = await self.servers.ends_of(account.topic)
        account.left_at = None
        welcome = await peer.ask(Hello(self.name, account.topic, f"*:{self.listener.port}"))
        assert isinstance(welcome, Welcome)
        if welcome.xpub_port != self.servers.ports["xpub"]:
            raise Violation(f"{self.name} is sent to the port {welcome.xpub_port}")
        loop.counts["hellos"] += 1
        self._is_address_known = True
        if not account.is_subscribed:
            account.must_come_from = await self.servers.ends_of(account.topic)
            account.is_subscribed = True
        elif welcome.is_new:
            raise Violation(f"the subscription of {self.name} to {account.topic} is gone")

    async def _say_goodbye(self, peer: ZmtpPeer, account: Account, loop: NetworkLoop) -> None:
        account.is_leaving, account.is_subscribed = True, False
        account.must_come_from = None
        try:
            await peer.ask(Goodbye(self.name, account.topic))
        except QuackError as error:
            # An earlier goodbye, whose answer was lost, has ended the subscription.
            if error.code != "unknown_subscription":
                raise
        loop.counts["goodbyes"] += 1
        account.is_leaving = False
        account.may_come_from = None
        account.left_at = loop.time()
        account.in_hand.clear()

    async def _acknowledge(self, peer: ZmtpPeer, account: Account, loop: NetworkLoop) -> None:
        """Process some messages in hand, and acknowledge them."""
        count = loop.source.randint(1, len(account.in_hand))
        chosen = loop.source.sample(list(account.in_hand), count)
        for position in chosen:
            account.process(position)
        ids = tuple(account.id_by_position[position] for position in chosen)
        marks = await peer.ask(Received(self.name, account.topic, ids))
        assert isinstance(marks, tuple)
        for position in chosen:
            account.in_hand.pop(position, None)
            # An acknowledgement of a message that is not leased yet may be forgotten.
            if self.servers.is_done(self.name, account.topic, position):
                account.noted[position] = loop.time()
        account.note_marks(marks)
        loop.counts["acknowledgements noted"] += count

    # --- the REP socket -------------------------------------------------------------------------

    async def _serve(self, peer: ZmtpPeer) -> None:
        """Answer `data` requests on one connection of the proxy."""
        await peer.introduce(b"REP")
        answered: tuple[Account, RecordPosition] | None = None
        postponed: dict[tuple[str, RecordPosition], float] = {}
        while True:
            delimiter, frame = await peer.receive_message()
            if answered is not None:  # the next request shows that the proxy has read the answer
                account, position = answered
                account.answers_read.add(position)
                account.noted.setdefault(position, self._loop.time())
            answered = None
            data = parse_data(frame)
            if data.client != self.name or data.topic not in self.accounts:
                raise Violation(f"{self.name} got {frame!r}")
            account = self.accounts[data.topic]
            position = account.accept(data.id, data.content)
            account.check_data(position, self._loop.time())
            self._loop.counts["data requests"] += 1
            self._check_postponed(postponed.pop((data.topic, position), None), position)
            answer = await self._answer(peer, account, position, data)
            if answer == encode_data_received(data):
                answered = (account, position)
            elif answer == encode_not_yet(data):
                postponed[data.topic, position] = self._loop.time()
            peer.send(b"", answer)

    def _check_postponed(self, since: float | None, position: RecordPosition) -> None:
        if since is not None:
            waited = self._loop.time() - since
            if waited < LEASE_MS / 1000 - _ROUNDING_SECONDS:
                raise Violation(f"{self.name} got {position} {waited:.3f} s after `not_yet`")
            self._loop.counts["data again after `not_yet`"] += 1

    async def _answer(
        self, peer: ZmtpPeer, account: Account, position: RecordPosition, data: Data
    ) -> bytes:
        """Return the answer to `data`. Raise ConnectionResetError to hang up without one."""
        source = self._loop.source
        fate = 0.0 if self.is_obedient else source.random()
        if fate > 0.96:
            await read_nothing(peer.writer, self._loop)
        elif fate > 0.92:
            await asyncio.sleep(source.random() * 5)
        elif fate > 0.89:
            return b"ERR busy later"
        elif fate > 0.87:
            return b"ack_received somebody else 1"
        if account.is_repeat(position) or fate < 0.6:
            account.process(position)
            account.in_hand.pop(position, None)
            if 0.5 < fate < 0.55:
                raise ConnectionResetError
            return encode_data_received(data)
        account.in_hand[position] = None
        return encode_not_yet(data)


class FirstDeliveries(ProtocolClient[ZmtpPeer]):
    """The SUB socket of a reliable subscriber."""

    server = "xpub"
    waits = True

    def __init__(self, subscriber: ReliableSubscriber) -> None:
        super().__init__(f"{subscriber.name}'s SUB socket", subscriber.topic)
        self._subscriber = subscriber
        self._next: dict[tuple[str, int], int] = {}
        self._dropped = 0

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ZmtpPeer:
        self._next.clear()
        self._dropped = self._subscriber.servers.xpub.dropped.count
        peer = await ZmtpPeer(reader, writer).introduce(b"SUB")
        for topic in self._subscriber.accounts:
            peer.send_command(b"SUBSCRIBE", ids_subscription(topic))
        # It corrects its name: the last one counts.
        for name in ("somebody", self._subscriber.name):
            peer.send_command(b"SUBSCRIBE", client_subscription(name))
        return peer

    async def _step(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        source = loop.source
        try:
            received = await peer.receive(wait_seconds=source.choice((0.1, 5.0, 50.0)))
        except TimeoutError:
            if source.random() < 0.2 and not self._subscriber.is_obedient:
                raise ConnectionResetError from None
            return
        if isinstance(received, Command) or len(received) != 3:
            raise Violation(f"{self.name} got {received}")
        first, body, message_id = received
        account = self._subscriber.accounts[str(parse_ids_subscription(first))]
        position = account.accept(message_id.decode(), body)
        self._check_order(account, position)
        loop.counts["first deliveries"] += 1
        if source.random() < 0.7 and not account.is_repeat(position):
            account.in_hand[position] = None
        if source.random() < 0.02:
            await read_nothing(peer.writer, loop)

    def _check_order(self, account: Account, position: RecordPosition) -> None:
        last = account.last_from_xpub.get(position.partition, -1)
        if position.offset <= last:
            raise Violation(f"{self.name} got {position} of {account.topic} after {last}")
        account.last_from_xpub[position.partition] = position.offset
        key = account.topic, position.partition
        expected = self._next.get(key, position.offset)
        has_lost = self._subscriber.servers.xpub.dropped.count > self._dropped
        if position.offset != expected and not has_lost:
            raise Violation(f"{self.name} got {position} of {account.topic} and not {expected}")
        self._next[key] = position.offset + 1
