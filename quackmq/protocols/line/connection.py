"""One peer: messages in, answers out, and the times that it has for them.

What a message means is the conversation's to say (`quackmq.protocols.line.codec`), what is done
about it the proxy's: a publisher's or a subscriber's, made when the peer says which it is. A
connection has one message under way; until that is answered nothing more is read, and nothing is
begun while the peer does not take its answers: the channel then holds it up.

At the end the broker says `terminate`, and lets the peer hang up for a while: who closes before
having read everything takes back what was sent. A peer that closes its own side first is answered
all that it had asked.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from quackmq.broker import Broker, Caller
from quackmq.errors import BrokerClosing, ProtocolError, QuackError
from quackmq.protocols.line import limits
from quackmq.protocols.line.codec import (
    Choose,
    Connect,
    Conversation,
    Entry,
    Event,
    Refused,
    Role,
    State,
    Word,
    encode,
)
from quackmq.protocols.line.joint_writes import Outgoing
from quackmq.protocols.line.publisher import Publisher
from quackmq.protocols.line.records import ConnectionRecord, End
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.line.subscriber import KeptLines, Subscriber
from quackmq.serving.connection import Admission, ConnectionBounds, ServedConnection
from quackmq.serving.first_bytes import MistakenPeers, WireProtocol, protocol_of

log = logging.getLogger(__name__)

_TERMINATE: Final = encode(Word.TERMINATE)
_REJECT: Final = encode(Word.REJECT)
_NAMED: Final = (State.PUB_NAMED, State.SUB_NAMED)
#: In these a peer may be silent for as long as it likes.
_SETTLED: Final = (State.PUBLISHING, State.LISTENING, State.DELIVERING)


class Door(Admission, Protocol):
    """What a connection needs of its door."""

    broker: Broker
    settings: LineSettings
    #: Into which every connection receives, and takes out what came before it returns.
    scratch: memoryview
    lines: KeptLines
    outgoing: Outgoing
    mistaken: MistakenPeers

    def ended(self, record: ConnectionRecord, end: End) -> None:
        """Of a peer that had said who it is."""

    async def take_over(self, name: str, connection: Connection) -> None:
        """From whoever is connected as this subscriber: returns when that has ended."""

    def give_up(self, name: str, connection: Connection) -> None: ...

    def work_on(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that a closing door waits for."""


class Connection(ServedConnection, asyncio.BufferedProtocol):
    def __init__(self, door: Door, channel: str = "") -> None:
        """`channel` is the name of what leads to the peer, unless its address tells."""
        super().__init__(door, channel=channel)
        self._door = door
        self._conversation = Conversation(door.settings.entry_bytes)
        self._unsent: bytes | None = None
        self._proxy: Publisher | Subscriber | None = None
        self._end: End | None = None
        self._pumping = False
        self._peer_is_done = False
        #: Whether the log has a rejection of its: a peer may try again and again.
        self._told = False
        #: Since when an entry waits for its answer.
        self._delivered_at: float | None = None
        #: The time of an entry whose answer was late at the last sweep.
        self._late: float | None = None
        #: How many messages had come when a sweep first saw what it waits for, and when that was.
        self._messages = 0
        self._waits_since: tuple[int, float] | None = None

    # --- what the transport calls -----------------------------------------------------------

    @property
    def bounds(self) -> ConnectionBounds:
        return ConnectionBounds(
            limits.LINE_WRITE_BUFFER_BYTES, limits.LINE_SEND_WAIT_MS, limits.LINE_LINGER_MS
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._channel:
            # An answer does not wait for more to send with it.
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)

    def _on_opened(self) -> None:
        self._channel = self._caller.address

    def _on_refused(self) -> None:
        self._channel = self._caller.address
        self._end = End.EXPELLED
        self._has_ended = True
        self._tell(None, self._end, "no more connections are taken")
        # Without letting it linger: each holds a file.
        self._transport.write(_TERMINATE)
        self._transport.close()
        self._loop.call_later(limits.LINE_LINGER_MS / 1000, self.abort)

    def _address_of(self, host: str, port: int) -> str:
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._door.scratch

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._door.scratch[:nbytes].tobytes())

    def data_received(self, data: bytes) -> None:
        if self._end is not None:
            return
        if not self._draining and self._conversation.receive_successful(data):
            self._messages += 1
            self._on_successful()
        else:
            self._conversation.receive(data)
            self.pump()

    def eof_received(self) -> bool:
        """True: what was asked before is answered before we close."""
        if self._end is not None:
            return False
        self._peer_is_done = True
        self._end_if_done()
        return True

    def _on_writable(self) -> None:
        self.pump()
        if isinstance(self._proxy, Subscriber):
            self._proxy.look()

    def _on_lost(self) -> None:
        self.end(End.GONE)

    # --- what the door calls ----------------------------------------------------------------

    @property
    def record(self) -> ConnectionRecord | None:
        """None until the peer has said who it is."""
        peer = self._conversation.peer
        if peer is None or self._proxy is None:
            return None
        counts = self._proxy.counts()
        return ConnectionRecord(
            peer.role, peer.id, self._channel, self._conversation.topics, **counts
        )

    @property
    def who(self) -> tuple[Role, str, str, tuple[str, ...]] | None:
        """The same without its counts: role, id, channel, topics. The channel in letters that every
        door can send, which a path need not be."""
        peer = self._conversation.peer
        if peer is None or self._proxy is None:
            return None
        channel = self._channel.encode(errors="backslashreplace").decode()
        return peer.role, peer.id, channel, self._conversation.topics

    def pump(self) -> None:
        """Take up what has come, as far as it may be now, and read on if that was all."""
        # What is begun here may be answered here, which would pump again.
        if self._end is not None or self._pumping:
            return
        self._pumping = True
        try:
            self._take_some()
        except ProtocolError as error:
            self._expel(error)
        finally:
            self._pumping = False
        self._end_if_done()
        self._regulate()

    def drain(self) -> None:
        """Answer what was asked, await the answer to what was sent, then say that this is all."""
        self._draining = True
        self._end_if_done()

    def _on_deaf(self, wait_ms: float) -> None:
        self.end(End.DEAD, f"it took no answers for {wait_ms} ms")

    def _sweep(self, now: float) -> None:
        """End the connection of a peer that has been silent for too long."""
        answer_ms = self._door.settings.answer_ms
        was_late, self._late = self._late, None
        if _passed_ms(self._delivered_at, now) > answer_ms and was_late != self._delivered_at:
            # If this process stood still, the answer may be there and not read yet.
            self._late = self._delivered_at
        elif _passed_ms(self._delivered_at, now) > answer_ms:
            self.end(End.DEAD, f"no answer to an entry for {answer_ms} ms; its subscription stays")
        elif (wait_ms := self._wait_ms()) is None:
            self._waits_since = None
        elif self._waits_since is None or self._waits_since[0] != self._messages:
            self._waits_since = self._messages, now
        elif _passed_ms(self._waits_since[1], now) > wait_ms:
            self.end(End.DEAD, f"a message was not there, or not whole, after {wait_ms} ms")

    def end(self, end: End, detail: str = "") -> None:
        """Once and for all. What the peer has not answered stays unacknowledged."""
        if self._end is not None:
            return
        self._end = end
        self._has_ended = True
        self._delivered_at = None
        record = self.record
        self._tell(record, end, detail)
        if self._proxy is not None:
            self._door.work_on(self._proxy.close())
        if record is not None:
            self._door.ended(record, end)
        if self._conversation.state is not State.OVER:
            self._conversation.answer(Word.TERMINATE)
        self._part(says_so=end not in (End.GONE, End.MISTAKEN))

    def cancel(self) -> None:
        self.end(End.CLOSED)

    async def closed_proxy(self) -> None:
        """Returns when nothing of the broker's is in use by this any more."""
        if self._proxy is not None:
            await self._proxy.close()

    @property
    def is_over(self) -> bool:
        return self._end is not None

    @property
    def unread_bytes(self) -> int:
        return self._conversation.unread_bytes

    # --- what proxies call ------------------------------------------------------------------

    @property
    def caller(self) -> Caller:
        return self._caller

    def answer(self, word: Word) -> None:
        if self._end is None and self._transport is not None:
            self.send_unsent()
            self._transport.write(self._conversation.answer(word))
            self.pump()

    def deliver(self, entry: Entry, line: bytes) -> None:
        """To a peer that listens. RecordTooLarge, and then nothing has happened."""
        line = self._conversation.deliver(entry, line)
        self._delivered_at = self._time()
        self._unsent = line
        self._door.outgoing.add(self)

    def send_unsent(self) -> None:
        """Write an entry that was delivered and waits to be written with others."""
        line, self._unsent = self._unsent, None
        if line is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.write(line)

    def listens(self) -> bool:
        """Whether it may be sent an entry now."""
        return (
            self._conversation.state is State.LISTENING
            and not self._conversation.owes_answer
            and self._end is None
            and self._slow_since is None
            and not self._draining
            and not self._peer_is_done
        )

    # --- messages ---------------------------------------------------------------------------

    def _take_some(self) -> None:
        """So many at a time: others are to have their turn."""
        for _ in range(limits.LINE_MESSAGES_AT_ONCE):
            if not self._may_take():
                return
            event = self._conversation.next_event()
            if event is None:
                return
            self._messages += 1
            self._on_event(event)
        self._loop.call_soon(self.pump)

    def _may_take(self) -> bool:
        if self._end is not None or self._slow_since is not None:
            return False
        return not self._draining or self._conversation.state is State.DELIVERING

    def _on_event(self, event: Event) -> None:
        if event is Word.SUCCESSFUL:
            self._on_successful()
        elif isinstance(event, Entry):
            assert isinstance(self._proxy, Publisher), "a subscriber's is out of order"
            self._proxy.publish(event)
        elif isinstance(event, Refused):
            level = logging.DEBUG if self._told else logging.INFO
            log.log(level, "%s rejected: %s", self.record or self._channel, event.error)
            self._told = True
            self.send_unsent()
            self._transport.write(_REJECT)
        elif event is Word.TERMINATE:
            self.end(End.TERMINATED)
        else:
            self._work_on_introduction(event)

    def _on_successful(self) -> None:
        # Who answers twice answers an entry that is not written yet: the next must not replace it.
        self.send_unsent()
        self._delivered_at = None
        assert isinstance(self._proxy, Subscriber), "it was delivered something"
        self._proxy.answered()

    def _work_on_introduction(self, event: Event) -> None:
        proxy = self._proxy
        if isinstance(event, Connect):
            self._caller = Caller(address=self._channel, client=event.id)
            self._proxy = self._proxy_of(event)
            self.answer(Word.ACCEPT)
        elif self._conversation.state in _NAMED:
            self.answer(Word.ACCEPT)
        else:
            assert proxy is not None, "it has said who it is"
            work = proxy.choose(event.topic) if isinstance(event, Choose) else self._begin(proxy)
            self._door.work_on(self._judge(work))

    def _proxy_of(self, peer: Connect) -> Publisher | Subscriber:
        if peer.role is Role.PUB:
            entry_bytes = self._door.settings.entry_bytes
            return Publisher(self._door.broker, self, peer.id, entry_bytes)
        return Subscriber(self._door, self, peer.id)

    async def _begin(self, proxy: Publisher | Subscriber) -> None:
        await proxy.begin(self._conversation.topics)
        log.info("%s connected", self.record)

    async def _judge(self, work: Coroutine[Any, Any, None]) -> None:
        """`accept` if it works."""
        try:
            await work
        except BrokerClosing:
            self.end(End.CLOSED)
        except QuackError as error:
            log.log(
                logging.DEBUG if self._told else logging.INFO, "%s rejected: %s", self.record, error
            )
            self._told = True
            self.answer(Word.REJECT)
        except Exception:
            log.exception("%s: a message failed", self._channel)
            self.end(End.FAILED)
        else:
            self.answer(Word.ACCEPT)
            if isinstance(self._proxy, Subscriber):
                self._proxy.look()

    def _regulate(self) -> None:
        """Read on, unless something that has come is still to be looked at."""
        if self._end is not None:
            return
        self._read(self._conversation.unread_bytes == 0 and self._slow_since is None)

    # --- the end ----------------------------------------------------------------------------

    def _end_if_done(self) -> None:
        """Where this side or the other wants an end, and all that was asked is answered."""
        if self._end is not None or self._conversation.owes_answer:
            return
        if self._peer_is_done and not self._conversation.unread_bytes:
            self.end(End.GONE)
        elif self._draining and self._conversation.state is not State.DELIVERING:
            self.end(End.CLOSED)

    def _expel(self, error: ProtocolError) -> None:
        """End the connection of a peer that made no sense. A stranger is told that its message was
        rejected, unless it speaks another protocol: that one hears nothing."""
        if self._conversation.peer is None:
            protocol = protocol_of(self._conversation.opening)
            if protocol is not None and protocol is not WireProtocol.LINE:
                self._door.mistaken.report(self._channel, protocol, self._loop.time())
                self.end(End.MISTAKEN)
                return
            if self._transport is not None:
                self._transport.write(_REJECT)
            self.end(End.EXPELLED, f"{error}, not with {self._conversation.opening!r}")
            return
        self.end(End.EXPELLED, str(error))

    def _part(self, says_so: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not says_so or self._slow_since is not None:
            transport.close()
            self._loop.call_later(limits.LINE_LINGER_MS / 1000, self.abort)
        else:
            self.send_unsent()
            transport.write(_TERMINATE)
            self._finish()

    def _tell(self, record: ConnectionRecord | None, end: End, detail: str) -> None:
        # A peer that speaks another protocol is logged by the door, once a minute.
        expected = end in (End.TERMINATED, End.CLOSED, End.GONE, End.MISTAKEN)
        if record is None:
            who: object = self._channel
            level = logging.DEBUG if expected else logging.WARNING
        else:
            who = record
            level = logging.INFO if expected else logging.WARNING
        log.log(level, "%s ended: %s%s", who, end, f" ({detail})" if detail else "")

    def _wait_ms(self) -> int | None:
        """How long the next message may take now; None for as long as it likes."""
        if self._conversation.owes_answer:
            return None
        if self._conversation.is_amid:
            return limits.LINE_WAIT_MS
        return None if self._conversation.state in _SETTLED else limits.LINE_HANDSHAKE_MS


def _passed_ms(since: float | None, now: float) -> float:
    return 0.0 if since is None else (now - since) * 1000
