"""Transactions of Kafka's producers, over the pure rules of `quackmq.model.transactional_id`.

Open `service` first: who may write, how a transaction ends, when its time is up. `registry` holds
every transactional id, `entry` is one of them in memory, `state` is its stored form.
"""
