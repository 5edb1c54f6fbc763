"""The door for lines: publishers and subscribers over TCP, Unix sockets and pipes.

Read in this order: `server` (the door: who may come in, what its peers share), `connection` (one
peer: messages in, answers out, its times), `publisher` and `subscriber` (the proxies: what is done
for each), `records` (who is connected), `pipes` and `socket_file` (two of the channels). The
language is `quackmq.wire.line`'s business.
"""
