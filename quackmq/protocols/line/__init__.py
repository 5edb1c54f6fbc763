"""The line protocol: publishers and subscribers over TCP, Unix sockets and pipes.

Open `codec.conversation` first: it draws the states of a peer. Then `server` (the state that peers
share), `connection` (one peer and its deadlines), `publisher` and `subscriber` (the handlers of
each role), `turns` (which topic of a subscriber is next) and `records` (the connection records).
"""
