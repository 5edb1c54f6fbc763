"""`quackmq chaos-client`: a client that misbehaves in an order that a seed determines.

Open `command` first, then `plan` (the sequence of actions) and `runner` (which performs them).
`kafka`, `line`, `xpub` and `zmq` each implement one protocol.
"""
