"""The protocols that the broker speaks, each in a package of its own.

A package holds the codec (bytes to values, no I/O), the server (who may connect, what connections
share), the connection (one peer) and the handlers. Packages do not import each other. Open the
`server` of a protocol first. What servers and connections share is in `quackmq.serving`.
"""
