"""Kafka's protocol.

Open `server` first (who may connect, what connections share), then `connection` (one peer: requests
in, answers out, in order), `registry` (the APIs and versions that are advertised) and `handlers/`,
one module for each family of APIs. `codec/` reads and writes the bytes.
"""
