"""The reliable XPUB/XSUB proxy for ZeroMQ's PUB and SUB sockets.

Open `clients` first: it knows the clients that have said `hello`. The proxy has three sockets.
Publishers connect to `xsub`. `xpub` sends subscribers what `xpub_feed` reads from the broker.
`proxy_server` is a REP socket where clients introduce themselves. A message that a client does not
acknowledge in time is sent to its own REP socket (`retransmission`, over a `callback_connection`).
"""
