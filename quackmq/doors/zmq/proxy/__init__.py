"""The reliable XPUB/XSUB proxy: for ZeroMQ's PUB and SUB sockets, and who wants to be sure.

Three sockets. `publishers` is the XSUB, to which publishers connect; `subscribers` the XPUB, which
sends to subscribers what `feeds` reads from the broker, whoever has published it; `replies` is what
the REP is asked. Who has introduced itself there is a client (`clients`): what it does not
acknowledge in time is sent to its own REP socket (`retransmission`, over an `outgoing` connection).
The languages are `quackmq.wire.proxy`'s and `quackmq.wire.zmtp_messages`'s business.
"""
