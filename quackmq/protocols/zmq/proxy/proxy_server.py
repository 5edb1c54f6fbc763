"""The proxy's REP socket: `hello`, `goodbye`, acknowledgements and reliable publishing.

Publishing here is reliable, unlike publishing over a PUB socket. A message is acknowledged when it
is durable, and a repeated message is recognized by its publisher and number.

Call it only from the event loop.
"""

from __future__ import annotations

from quackmq.broker import Broker, Caller, RecordPosition, message_id, parse_message_id
from quackmq.errors import InvalidMessageId, UnknownTopic
from quackmq.protocols.zmq.budgets import Budgets
from quackmq.protocols.zmq.codec.proxy_language import (
    Goodbye,
    Hello,
    LastPublished,
    Publish,
    Received,
    Request,
    Welcome,
    encode_goodbye_reply,
    encode_last_reply,
    encode_publish_reply,
    encode_received_reply,
    encode_welcome,
    parse_request,
)
from quackmq.protocols.zmq.proxy.clients import Clients, ProxySettings
from quackmq.protocols.zmq.proxy.retransmission import Multicast
from quackmq.protocols.zmq.queue_handlers import PendingReply, Reply, Requester, error_reply
from quackmq.protocols.zmq.server import ZmqServer
from quackmq.records.batch import NO_TIMESTAMP, Record
from quackmq.serving.server import Address


class ProxyServer(ZmqServer):
    """The proxy's REP socket."""

    name = "proxy"

    def __init__(
        self,
        broker: Broker,
        host: str,
        port: int,
        multicast: Multicast,
        settings: ProxySettings = ProxySettings(),  # noqa: B008  (frozen)
        budgets: Budgets | None = None,
    ) -> None:
        super().__init__(broker, host, port, budgets, self._begin_request)
        self.clients = Clients(broker, multicast, settings)

    async def start(self) -> Address:
        address = await super().start()
        await self.clients.load()
        return address

    async def close(self) -> None:
        await super().close()
        await self.clients.close()

    def _begin_request(self, requester: Requester, frame: bytes) -> PendingReply | Reply:
        """Start to handle a request; return its reply, or a coroutine for it. Never raise."""
        try:
            request = parse_request(frame)
            caller = requester.caller(request.client)
            if isinstance(request, Received):
                return self._acknowledge(caller, request), b""
            return self._reply(caller, request)
        except Exception as error:
            return error_reply(error)

    async def _reply(self, caller: Caller, request: Request) -> Reply:
        try:
            return await self._handle(caller, request), b""
        except Exception as error:
            return error_reply(error)

    async def _handle(self, caller: Caller, request: Request) -> bytes:
        """Handle every request except acknowledgements; return the words of the reply."""
        topic = request.topic
        if isinstance(request, Publish):
            record = Record(0, NO_TIMESTAMP, None, request.content)
            await self.broker.messages.put(
                caller, topic, (record,), publisher=request.client, sequence=request.number
            )
            return encode_publish_reply(request)
        if isinstance(request, Hello):
            is_new = await self.clients.hello(caller, topic, request.address)
            # Port 0 tells the client that there is no XPUB socket.
            _, port = self.broker.listener_addresses.get("xpub", ("", 0))
            return encode_welcome(request, Welcome(is_new, port))
        if isinstance(request, Goodbye):
            await self.clients.goodbye(caller, topic)
            return encode_goodbye_reply(request)
        assert isinstance(request, LastPublished), "acknowledgements are handled elsewhere"
        return encode_last_reply(request, await self._find_last_number(caller, request))

    async def _find_last_number(self, caller: Caller, request: LastPublished) -> int | None:
        try:
            return await self.broker.messages.last_sequence(caller, request.topic, request.client)
        except UnknownTopic:
            return None  # a new publisher asks before its first message creates the topic

    def _acknowledge(self, caller: Caller, request: Received) -> bytes:
        """Acknowledge the named messages. Return a reply with the low-water marks of their
        partitions. Raise InvalidMessageId if an id belongs to another topic.
        """
        topic_id = self.broker.topic(request.topic).id
        positions: list[tuple[int, int]] = []
        for token in request.ids:
            token_topic_id, position = parse_message_id(token)
            if token_topic_id != topic_id:
                raise InvalidMessageId(f"the message id {token} is of another topic")
            positions.append(position)
        marks = self.clients.acknowledge(caller, request.topic, positions)
        mark_ids = [message_id(topic_id, RecordPosition(*mark)) for mark in marks.items()]
        return encode_received_reply(request, tuple(mark_ids))
