"""Push subscriptions: the broker sends entries, and peers acknowledge each one.

Open `service` first. `channel` is one connected peer, `window` and `live_tail` hold the newest
entries for all of them, `push_registry` finds the subscriptions (`push_subscription` is one of
them), `flusher` saves their progress (`state` is its encoding), `receipt_ranges` what receipts say,
and `unacknowledged` tells which subscriptions have not acknowledged an entry.
"""
