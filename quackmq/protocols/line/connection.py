"""One peer: receive messages, send answers, and enforce deadlines.

`codec.Conversation` decides what a message means in the present state. A handler carries it out: a
`Publisher` or a `Subscriber`, made when the peer says which it is. A connection handles one message
at a time. It reads no further until that message is answered, and handles no message while the peer
does not read its answers. So the transport's back-pressure slows the peer down.

At the end the broker sends `terminate` and gives the peer some time to close the connection. If the
broker closed it at once, unread answers could be lost. If the peer closes its sending side first,
it still gets all answers.

Call it only from the event loop.
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
from quackmq.protocols.line.codec.conversation import Conversation, Event, Refused, State
from quackmq.protocols.line.codec.escapes import describe_error
from quackmq.protocols.line.codec.messages import (
    Choose,
    Connect,
    Entry,
    Rejection,
    Role,
    Word,
    encode,
)
from quackmq.protocols.line.codec.polling import EntryAnswer, GetEntry
from quackmq.protocols.line.joint_writes import JointWrites
from quackmq.protocols.line.publisher import Publisher
from quackmq.protocols.line.records import ConnectionRecord, End
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.line.subscriber import EncodedLines, Subscriber
from quackmq.serving.connection import Admission, ConnectionBounds, ServedConnection
from quackmq.serving.first_bytes import MistakenPeers, WireProtocol, recognize_protocol
from quackmq.tasks import TaskSet

log = logging.getLogger(__name__)

_TERMINATE: Final = encode(Word.TERMINATE)
_NAMED_STATES: Final = (State.PUB_NAMED, State.SUB_NAMED)
#: States in which a peer may be silent for any time.
_UNTIMED_STATES: Final = (State.PUBLISHING, State.LISTENING, State.DELIVERING)


class ServerContext(Admission, Protocol):
    """The part of the server that its connections use."""

    broker: Broker
    settings: LineSettings
    #: The shared receive buffer; every connection copies its bytes out before it returns.
    scratch: memoryview
    encoded_lines: EncodedLines
    joint_writes: JointWrites
    mistaken_peers: MistakenPeers
    #: The work that a closing server waits for.
    tasks: TaskSet

    def add_ended(self, record: ConnectionRecord, end: End) -> None:
        """Record the end of a connection whose peer had given its id."""

    async def register_subscriber(self, name: str, connection: Connection) -> None:
        """End the former connection of this subscriber; return when it has released its
        channels.
        """

    def unregister_subscriber(self, name: str, connection: Connection) -> None: ...


class Connection(ServedConnection, asyncio.BufferedProtocol):
    """The connection of one publisher or subscriber."""

    _server: ServerContext

    def __init__(self, server: ServerContext, channel: str = "") -> None:
        """`channel` names a peer that has no network address."""
        super().__init__(server, channel=channel)
        self._conversation = Conversation(server.settings.entry_bytes)
        #: The entry that `joint_writes` will write.
        self._unsent_line: bytes | None = None
        self._handler: Publisher | Subscriber | None = None
        self._end: End | None = None
        self._end_detail = ""
        self._has_begun = False
        self._is_pumping = False
        self._has_peer_closed = False
        #: Whether a rejection was logged. Later ones are debug messages, as a peer may repeat them.
        self._has_logged_rejection = False
        #: The number of messages that were rejected after the peer had chosen its topics, and the
        #: last reason.
        self._rejections = 0
        self._last_rejection = ""
        #: When the unanswered entry was delivered.
        self._delivered_at: float | None = None
        #: The value of `_delivered_at` whose answer was late at the last sweep.
        self._late_delivery_at: float | None = None
        self._received_messages = 0
        #: The number of received messages when a sweep first found that the peer must send the next
        #: one in time, and the time of that sweep.
        self._waits_since: tuple[int, float] | None = None

    # --- called by the transport ------------------------------------------------------------

    @property
    def bounds(self) -> ConnectionBounds:
        return ConnectionBounds(
            limits.LINE_WRITE_BUFFER_BYTES, limits.LINE_SEND_WAIT_MS, limits.LINE_LINGER_MS
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._channel:
            # TCP must send an answer at once, and not wait for more bytes.
            peer_socket = transport.get_extra_info("socket")
            peer_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)

    def _on_opened(self) -> None:
        self._channel = self._caller.address

    def _on_refused(self) -> None:
        """Send `terminate` to a peer that the server does not admit, and close the connection."""
        self._channel = self._caller.address
        self._end = End.EXPELLED
        self._has_ended = True
        self._log_end(None, self._end, "no more connections are taken")
        # Close without waiting for the peer: each refused connection holds a file descriptor.
        self._transport.write(_TERMINATE)
        self._transport.close()
        self._loop.call_later(limits.LINE_LINGER_MS / 1000, self.abort)

    def _address_of(self, host: str, port: int) -> str:
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.scratch

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._server.scratch[:nbytes].tobytes())

    def data_received(self, data: bytes) -> None:
        """Handle received bytes. An expected `successful`, the most frequent message, takes a
        shorter way.
        """
        if self._end is not None:
            return
        # While the server drains, `pump` must end the connection after this answer.
        if not self._is_draining and self._conversation.receive_successful(data):
            self._received_messages += 1
            self._on_successful()
        else:
            self._conversation.receive(data)
            self.pump()

    def eof_received(self) -> bool:
        """Answer what the peer has sent before it closed its side; return True to stay open."""
        if self._end is not None:
            return False
        self._has_peer_closed = True
        self._end_if_done()
        return True

    def _on_writable(self) -> None:
        self.pump()
        if isinstance(self._handler, Subscriber):
            self._handler.send_next()

    def _on_lost(self) -> None:
        self.end(End.GONE)

    # --- called by the server ---------------------------------------------------------------

    @property
    def record(self) -> ConnectionRecord | None:
        """The connection's record; None until the peer has given its id."""
        peer = self._conversation.peer
        if peer is None or self._handler is None:
            return None
        counts = self._handler.counts()
        return ConnectionRecord(
            peer.role, peer.id, self._channel, self._conversation.topics, **counts
        )

    @property
    def identity(self) -> tuple[Role, str, str, tuple[str, ...]] | None:
        """Role, id, channel and topics; None until the peer has given its id. The channel is valid
        Unicode, which the path of a Unix socket need not be.
        """
        peer = self._conversation.peer
        if peer is None or self._handler is None:
            return None
        channel = self._channel.encode(errors="backslashreplace").decode()
        return peer.role, peer.id, channel, self._conversation.topics

    def pump(self) -> None:
        """Handle received messages as far as that is allowed now; read more if all were
        handled.
        """
        # Handling a message may answer it, which calls `pump` again.
        if self._end is not None or self._is_pumping:
            return
        self._is_pumping = True
        try:
            self._handle_some()
        except ProtocolError as error:
            self._expel(error)
        finally:
            self._is_pumping = False
        self._end_if_done()
        self._update_reading()

    def drain(self) -> None:
        """Answer received messages, wait for the answer to a sent entry, then send `terminate`."""
        self._is_draining = True
        self._end_if_done()

    def _on_not_reading(self, wait_ms: float) -> None:
        self.end(End.DEAD, f"it read no answers for {wait_ms} ms")

    def _sweep(self, now: float) -> None:
        """End the connection of a peer that has been silent for too long."""
        answer_ms = self._server.settings.answer_ms
        was_late, self._late_delivery_at = self._late_delivery_at, None
        if _elapsed_ms(self._delivered_at, now) > answer_ms and was_late != self._delivered_at:
            # If this process was paused, the answer may have arrived and is not read yet. So the
            # peer has time until the next sweep.
            self._late_delivery_at = self._delivered_at
        elif _elapsed_ms(self._delivered_at, now) > answer_ms:
            self.end(End.DEAD, f"no answer to an entry for {answer_ms} ms; its subscription stays")
        elif (wait_ms := self._wait_ms()) is None:
            self._waits_since = None
        elif self._waits_since is None or self._waits_since[0] != self._received_messages:
            self._waits_since = self._received_messages, now
        elif _elapsed_ms(self._waits_since[1], now) > wait_ms:
            self.end(End.DEAD, f"a message was missing or incomplete after {wait_ms} ms")

    def end(self, end: End, detail: str = "") -> None:
        """End the connection; later calls do nothing. An unanswered entry is not acknowledged."""
        if self._end is not None:
            return
        self._end = end
        self._end_detail = detail
        self._has_ended = True
        self._delivered_at = None
        record = self.record
        self._log_end(record, end, detail)
        if self._handler is not None:
            self._server.tasks.start(self._handler.close())
        if record is not None:
            self._server.add_ended(record, end)
        if self._conversation.state is not State.OVER:
            self._conversation.answer(Word.TERMINATE)
        self._close_transport(says_terminate=end not in (End.GONE, End.MISTAKEN))

    def cancel(self) -> None:
        self.end(End.CLOSED)

    async def close_handler(self) -> None:
        """Close the handler; return when it has released its channels."""
        if self._handler is not None:
            await self._handler.close()

    @property
    def is_over(self) -> bool:
        return self._end is not None

    @property
    def how_ended(self) -> End | None:
        """How the connection has ended; None while it lasts."""
        return self._end

    @property
    def end_detail(self) -> str:
        """More about how the connection has ended; may be empty."""
        return self._end_detail

    @property
    def has_begun(self) -> bool:
        """Whether the peer has chosen its topics. It stays true after the end."""
        return self._has_begun

    @property
    def rejections(self) -> int:
        """The number of messages that were rejected after the peer had chosen its topics."""
        return self._rejections

    @property
    def last_rejection(self) -> str:
        """The reason of the last of the `rejections`; empty if there are none."""
        return self._last_rejection

    @property
    def unread_bytes(self) -> int:
        return self._conversation.unread_bytes

    # --- called by handlers -----------------------------------------------------------------

    @property
    def caller(self) -> Caller:
        return self._caller

    def answer(self, word: Word, reason: str = "") -> None:
        """Answer the current message, and handle the next one. `reject` may have a reason."""
        if self._end is None and self._transport is not None:
            if self._unsent_line is not None:
                self.send_unsent()
            self._transport.write(self._conversation.answer(word, reason))
            self.pump()

    def answer_entry(self, answer: EntryAnswer) -> None:
        """Answer the current message, which is `getentry`, and handle the next one."""
        if self._end is None and self._transport is not None:
            self.send_unsent()
            self._transport.write(self._conversation.answer_entry(answer))
            self.pump()

    def reject(self, error: QuackError) -> None:
        """Answer the current message with `reject` and the reason, and handle the next one."""
        reason = describe_error(error)
        self._count_rejection(reason)
        self.answer(Word.REJECT, reason)

    def deliver(self, entry: Entry, line: bytes) -> None:
        """Send an entry to a peer that can receive one. Raise RecordTooLarge, and change nothing,
        if it is too long.
        """
        line = self._conversation.deliver(entry, line)
        self._delivered_at = self._time()
        self._unsent_line = line
        self._server.joint_writes.add(self)

    def send_unsent(self) -> None:
        """Write the delivered entry that waits for the joint write."""
        line, self._unsent_line = self._unsent_line, None
        if line is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.write(line)

    def can_receive_entry(self) -> bool:
        """Return whether an entry may be sent to the peer now."""
        return (
            self._conversation.state is State.LISTENING
            and not self._conversation.owes_answer
            and self._end is None
            and self._slow_since is None
            and not self._is_draining
            and not self._has_peer_closed
        )

    # --- messages ---------------------------------------------------------------------------

    def _handle_some(self) -> None:
        """Handle a bounded number of messages; then other connections run."""
        for _ in range(limits.LINE_MESSAGES_AT_ONCE):
            if not self._may_handle():
                return
            event = self._conversation.next_event()
            if event is None:
                return
            self._received_messages += 1
            self._on_event(event)
        # More messages may have arrived. The next turn of the loop handles them.
        self._loop.call_soon(self.pump)

    def _may_handle(self) -> bool:
        """Return whether the next message may be handled now. While the server drains, only the
        answer to a sent entry is handled.
        """
        if self._end is not None or self._slow_since is not None:
            return False
        return not self._is_draining or self._conversation.state is State.DELIVERING

    def _on_event(self, event: Event) -> None:
        """Carry out a message, or answer `reject` to a refused line."""
        if event is Word.SUCCESSFUL:
            self._on_successful()
        elif isinstance(event, Entry):
            assert isinstance(self._handler, Publisher), "a subscriber's entry is out of order"
            self._handler.publish(event)
        elif isinstance(event, Refused):
            self._log_rejection(event.error)
            reason = describe_error(event.error)
            self._count_rejection(reason)
            self.send_unsent()
            self._transport.write(encode(Rejection(reason)))
        elif isinstance(event, GetEntry):
            assert isinstance(self._handler, Subscriber), "a publisher's request is out of order"
            self._server.tasks.start(self._answer_outcome(self._handler.get_entry(event)))
        elif event is Word.TERMINATE:
            self.end(End.TERMINATED)
        else:
            self._on_introduction(event)

    def _on_successful(self) -> None:
        """Acknowledge the sent entry, and send the next one."""
        # A peer that answers twice answers an entry that is not written yet. Write that entry
        # before the next one replaces it.
        if self._unsent_line is not None:
            self.send_unsent()
        self._delivered_at = None
        assert isinstance(self._handler, Subscriber), "an entry was delivered"
        self._handler.on_successful()

    def _on_introduction(self, event: Event) -> None:
        """Handle a message before the first entry: the id, a topic, or `end`."""
        handler = self._handler
        if isinstance(event, Connect):
            self._caller = Caller(address=self._channel, client=event.id)
            self._handler = self._make_handler(event)
            self.answer(Word.ACCEPT)
        elif self._conversation.state in _NAMED_STATES:
            self.answer(Word.ACCEPT)
        else:
            assert handler is not None, "the peer has given its id"
            if isinstance(event, Choose):
                work: Coroutine[Any, Any, None] = handler.choose(event.topic)
            else:
                work = self._begin(handler)
            self._server.tasks.start(self._answer_outcome(work))

    def _make_handler(self, peer: Connect) -> Publisher | Subscriber:
        if peer.role is Role.PUB:
            entry_bytes = self._server.settings.entry_bytes
            return Publisher(self._server.broker, self, peer.id, entry_bytes)
        return Subscriber(self._server, self, peer.id)

    async def _begin(self, handler: Publisher | Subscriber) -> None:
        await handler.begin(self._conversation.topics)
        self._has_begun = True
        log.info("%s connected", self.record)

    async def _answer_outcome(self, work: Coroutine[Any, Any, EntryAnswer | None]) -> None:
        """Answer what `work` returns, `accept` if that is None, and `reject` if it raises an error
        of ours. Then send an entry, which was not possible before the answer.
        """
        try:
            answer = await work
        except BrokerClosing:
            self.end(End.CLOSED)
        except QuackError as error:
            self._log_rejection(error)
            self.reject(error)
        except Exception:
            log.exception("%s: a message failed", self._channel)
            self.end(End.FAILED)
        else:
            if answer is None:
                self.answer(Word.ACCEPT)
            else:
                self.answer_entry(answer)
        if isinstance(self._handler, Subscriber):
            self._handler.send_next()

    def _count_rejection(self, reason: str) -> None:
        if self._has_begun:
            self._rejections += 1
            self._last_rejection = reason

    def _log_rejection(self, error: QuackError) -> None:
        level = logging.DEBUG if self._has_logged_rejection else logging.INFO
        log.log(level, "%s rejected: %s", self.record or self._channel, error)
        self._has_logged_rejection = True

    def _update_reading(self) -> None:
        """Read, unless received bytes are not handled yet or the peer is slow."""
        if self._end is not None:
            return
        self._set_reading(self._conversation.unread_bytes == 0 and self._slow_since is None)

    # --- the end ----------------------------------------------------------------------------

    def _end_if_done(self) -> None:
        """End the connection if the peer has closed its side or the server drains, and all
        messages are answered.
        """
        if self._end is not None or self._conversation.owes_answer:
            return
        if self._has_peer_closed and not self._conversation.unread_bytes:
            self.end(End.GONE)
        elif self._is_draining and self._conversation.state is not State.DELIVERING:
            self.end(End.CLOSED)

    def _expel(self, error: ProtocolError) -> None:
        """End the connection of a peer that sent invalid bytes. A peer that has not connected gets
        `reject`, unless it speaks another protocol; then it gets nothing.
        """
        if self._conversation.peer is None:
            protocol = recognize_protocol(self._conversation.opening)
            if protocol is not None and protocol is not WireProtocol.LINE:
                self._server.mistaken_peers.report(self._channel, protocol, self._loop.time())
                self.end(End.MISTAKEN)
                return
            if self._transport is not None:
                self._transport.write(encode(Rejection(describe_error(error))))
            self.end(End.EXPELLED, f"{error}, not with {self._conversation.opening!r}")
            return
        self.end(End.EXPELLED, str(error))

    def _close_transport(self, says_terminate: bool) -> None:
        """Send `terminate` if `says_terminate`, and close. A slow peer gets no `terminate`: it
        would not read it.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not says_terminate or self._slow_since is not None:
            transport.close()
            # Abort if the peer does not read the unsent bytes in time.
            self._loop.call_later(limits.LINE_LINGER_MS / 1000, self.abort)
        else:
            self.send_unsent()
            transport.write(_TERMINATE)
            self._finish()

    def _log_end(self, record: ConnectionRecord | None, end: End, detail: str) -> None:
        """Log how a connection ended. An unexpected end is a warning."""
        # The server logs peers that speak another protocol, once a minute.
        is_expected = end in (End.TERMINATED, End.CLOSED, End.GONE, End.MISTAKEN)
        if record is None:
            subject: object = self._channel
            level = logging.DEBUG if is_expected else logging.WARNING
        else:
            subject = record
            level = logging.INFO if is_expected else logging.WARNING
        log.log(level, "%s ended: %s%s", subject, end, f" ({detail})" if detail else "")

    def _wait_ms(self) -> int | None:
        """Return how long the next message may take at present; None for any time."""
        if self._conversation.owes_answer:
            return None
        if self._conversation.has_pending_bytes:
            return limits.LINE_WAIT_MS
        return None if self._conversation.state in _UNTIMED_STATES else limits.LINE_HANDSHAKE_MS


def _elapsed_ms(since: float | None, now: float) -> float:
    return 0.0 if since is None else (now - since) * 1000
