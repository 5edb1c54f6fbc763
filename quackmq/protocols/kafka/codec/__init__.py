"""Kafka's protocol as bytes and values: no sockets, no broker, no clock.

Open `framing` first: it cuts a stream into requests and reads their headers. `reader` reads any
request and `writer` writes any response by kio's schemas; `produce` and `fetch` do both by hand for
the two APIs that carry records, which stay a memoryview. Invalid bytes raise ProtocolError.
"""
