"""The protocols that the broker speaks, each in a package of its own.

A package holds the codec (bytes to values, no I/O), the server (who may connect, what connections
share), the connection (one peer) and the handlers. Packages do not import each other. Open the
`server` of a protocol first. `first_bytes` recognises a peer that speaks another protocol.
"""
