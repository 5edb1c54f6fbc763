"""The line protocol: publishers and subscribers over TCP, Unix sockets and pipes.

Open `codec` first: it draws the states of a peer. Then `server` (who may connect, what peers
share), `connection` (one peer and its deadlines), `publisher` and `subscriber` (what is done for
each) and `records` (the connection records).
"""
