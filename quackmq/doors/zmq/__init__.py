"""The door for ZeroMQ's REQ sockets: put, get, subscribe, unsubscribe, one text frame each.

Read in this order: `server` (the door: who may come in, what its peers share), `connection` (one
peer: requests in, answers out), `requests` (what each request asks of the broker). The language is
`quackmq.wire.zmq`'s business, ZeroMQ's protocol on TCP `quackmq.wire.zmtp`'s.
"""

from __future__ import annotations

from quackmq.doors.zmq.server import ZmqDoor

__all__ = ["ZmqDoor"]
