"""The line protocol in bytes, without sockets: the messages as lines, and what may follow what.

Open `messages` first: it draws the lines. `conversation` has the states of a peer, `polling`
`getentry` and its answers, `escapes` the bytes that are escaped, `words` the ids and topics.
"""
