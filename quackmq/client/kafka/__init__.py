"""The Python client over Kafka's protocol, on librdkafka.

Open `client` first; `aio` is the same for asyncio, and `session` what both consist of. `producer`
and `numbered` put messages, `cluster` and `admin` ask about topics and groups, `config` sets
librdkafka up, `types` are the public values, `errors`, `diagnostics`, `connection_errors` and
`reachable` turn failures into sentences.
"""
