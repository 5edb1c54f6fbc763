"""Pull subscriptions: durable, by name, one message at a time.

Open `service` first: it creates and deletes subscriptions. `pull` delivers messages,
`pull_subscription` is one subscription in memory, `registry` finds them, `cursors` mirrors the
stored cursors, `group_cursors` changes those that groups share, `name_modes` keeps one name from
being used in two ways, `start_offsets` finds where a subscription begins, `receipts` records what
was consumed.
"""
