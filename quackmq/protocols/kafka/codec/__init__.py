"""The Kafka protocol as bytes and values: no sockets, no broker, no clock.

Open `framing` first: it splits a stream into requests and decodes their headers. `reader` decodes
any request and `writer` encodes any response by kio's schemas. `produce` and `fetch` are
hand-written for the two APIs that carry records; records stay a memoryview. Invalid bytes raise
ProtocolError.
"""
