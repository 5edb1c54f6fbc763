"""Consumer groups of Kafka clients, on top of the pure rules of `quackmq.groups`.

Open `service` first: members, offsets, listings. `coordinator` runs rebalances and their deadlines,
`group_entry` is one group in memory, `group_factory` makes its active group. `state` and
`member_codec` are its stored form, `topic_patterns` resolves subscriptions by regular expression.
"""
