"""The door for ZeroMQ's sockets: put, get, subscribe, unsubscribe over REQ, a text frame each; and
in `proxy`, what PUB and SUB sockets send and get.

Read in this order: `server` (the door: who may come in, what its peers share), `peer` (one peer,
whatever its socket is), `connection` (one that asks: requests in, answers out), `requests` (what
each request asks of the broker), `proxy`. The language is `quackmq.wire.zmq`'s business, ZeroMQ's
protocol on TCP `quackmq.wire.zmtp`'s.
"""
