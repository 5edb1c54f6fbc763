"""The broker: all that a door sees. See `quackmq.broker.core`."""

from quackmq.broker.core import Broker
from quackmq.broker.settings import BrokerSettings, Caller
from quackmq.subscriptions import Message, Offset, Start, Subscription, Time

__all__ = [
    "Broker",
    "BrokerSettings",
    "Caller",
    "Message",
    "Offset",
    "Start",
    "Subscription",
    "Time",
]
