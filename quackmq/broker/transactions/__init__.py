"""Transactions of Kafka producers, on top of the pure rules of `quackmq.model.transactional_id`.

Open `service` first: which producer may write, how a transaction ends, when it times out.
`registry` holds every transactional id, `entry` is one transactional id in memory, `state` is its
stored form, `markers` makes the batches that end a transaction.
"""
