"""The reliable XPUB/XSUB proxy for ZeroMQ's PUB and SUB sockets.

It has three sockets: `xsub`, to which publishers connect; `xpub`, which sends subscribers what
`xpub_feed` reads from the broker; and `proxy_server`, a REP socket where clients introduce
themselves (`clients`). A message that a client does not acknowledge in time is sent to its own REP
socket (`retransmission`, over a `callback_connection`).
"""
