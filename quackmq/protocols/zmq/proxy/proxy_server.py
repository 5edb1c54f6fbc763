"""The proxy's REP socket: what clients ask, and what they are answered.

Publishing here is reliable, other than over a PUB socket: a message is acknowledged when it is
durable, and a repeat is known by its publisher and number.

Who may call: the loop.
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
    farewell,
    last_published,
    noted,
    parse_request,
    published,
    welcome,
)
from quackmq.protocols.zmq.proxy.clients import Clients, ProxySettings
from quackmq.protocols.zmq.proxy.retransmission import Multicast
from quackmq.protocols.zmq.queue_handlers import Answer, Asker, Begun, refusal
from quackmq.protocols.zmq.server import ZmqServer
from quackmq.records.batch import NO_TIMESTAMP, Record
from quackmq.serving.server import Address


class ProxyServer(ZmqServer):
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
        super().__init__(broker, host, port, budgets, self._begin_reply)
        self.clients = Clients(broker, multicast, settings)

    async def start(self) -> Address:
        address = await super().start()
        await self.clients.load()
        return address

    async def close(self) -> None:
        await super().close()
        await self.clients.close()

    def _begin_reply(self, broker: Broker, peer: Asker, frame: bytes) -> Begun | Answer:
        try:
            request = parse_request(frame)
            caller = peer.caller(request.client)
            if isinstance(request, Received):
                return self._received(caller, request), b""
            return self._reply(caller, request)
        except Exception as error:
            return refusal(error)

    async def _reply(self, caller: Caller, request: Request) -> Answer:
        try:
            return await self._answer(caller, request), b""
        except Exception as error:
            return refusal(error)

    async def _answer(self, caller: Caller, request: Request) -> bytes:
        topic = request.topic
        if isinstance(request, Publish):
            record = Record(0, NO_TIMESTAMP, None, request.content)
            await self.broker.messages.put(
                caller, topic, (record,), publisher=request.client, sequence=request.number
            )
            return published(request)
        if isinstance(request, Hello):
            is_new = await self.clients.hello(caller, topic, request.address)
            _, port = self.broker.doors.get("xpub", ("", 0))
            return welcome(request, Welcome(is_new, port))
        if isinstance(request, Goodbye):
            await self.clients.goodbye(caller, topic)
            return farewell(request)
        assert isinstance(request, LastPublished), "acknowledgements are answered elsewhere"
        return last_published(request, await self._last(caller, request))

    async def _last(self, caller: Caller, request: LastPublished) -> int | None:
        try:
            return await self.broker.messages.last_sequence(caller, request.topic, request.client)
        except UnknownTopic:
            return None  # a publisher's first question: its first message brings the topic to life

    def _received(self, caller: Caller, request: Received) -> bytes:
        topic_id = self.broker.topic(request.topic).id
        places: list[tuple[int, int]] = []
        for token in request.ids:
            named, place = parse_message_id(token)
            if named != topic_id:
                raise InvalidMessageId(f"the message id {token} is of another topic")
            places.append(place)
        marks = self.clients.received(caller, request.topic, places)
        tokens = [message_id(topic_id, RecordPosition(*mark)) for mark in marks.items()]
        return noted(request, tuple(tokens))
