"""`quackmq chaos-client`: a client that misbehaves, reproducibly by a seed.

Open `command` first, then `plan` (what it will do) and `runner` (how it is done). `kafka`, `line`,
`xpub` and `zmq` speak one protocol each.
"""
