"""Publishing: what a topic accepts, and where its records go.

Open `service` first: it publishes batches. `messages` puts single messages, `admission` checks a
batch against the policy of its topic, `placement` chooses the partition of each record and
recognises repeats by idempotency key, `producer_ids` hands out ids that are never given twice.
"""
