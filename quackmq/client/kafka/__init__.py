"""The Python client over the Kafka protocol, on librdkafka.

Open `client` first; `aio` is the same for asyncio, and `session` has the parts of both. `producer`
and `numbered` put messages, `cluster` and `admin` query topics and groups, `config` configures
librdkafka, `types` has the public values, and `errors`, `diagnostics`, `connection_errors` and
`reachable` turn failures into sentences.
"""
