"""ZMTP and the text languages on top of it: bytes and values, no sockets.

Open `zmtp` first: it is ZeroMQ's own protocol on TCP. `pubsub` holds the messages of PUB and SUB
sockets, `queue_language` the requests of the queue, `proxy_language` those of the reliable proxy,
and `words` the code that both languages share.
"""
