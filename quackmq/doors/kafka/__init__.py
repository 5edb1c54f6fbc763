"""The door for every client that speaks Kafka's protocol.

Read in this order: `server` (the door: who may come in, what it shares), `connection` (one peer:
requests in, answers out, in order), `registry` (the APIs and versions that are advertised), then
the families of APIs, one file each. Bytes are `quackmq.wire.kafka`'s business.
"""
