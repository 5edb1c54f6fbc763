"""The Kafka protocol.

Open `server` first (admission and shared state), then `connection` (one peer: requests in,
responses out, in order), `registry` (the advertised APIs and versions) and `handlers/`, one module
for each family of APIs. `codec/` decodes and encodes the bytes. `publish_turns` bounds what all
connections publish in one turn of the event loop.
"""
