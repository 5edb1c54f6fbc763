"""The line protocol in bytes, without sockets: the messages as lines, and what may follow what.

Open `conversation` first: it draws the lines and the states of a conversation. `polling` has
`getentry` and its answers, `escapes` the bytes that are escaped, `words` the ids and topics.
"""
