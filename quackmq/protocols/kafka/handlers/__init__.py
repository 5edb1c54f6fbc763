"""Handlers of Kafka's APIs, one module for each family.

A handler takes a decoded request and returns the fields of the response;
`quackmq.protocols.kafka.api` defines its context. Open `produce` and `fetch` first: they carry the
records.
"""
