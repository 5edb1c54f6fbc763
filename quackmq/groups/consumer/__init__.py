"""Kafka's newer group protocol (KIP-848): one heartbeat request carries everything. Pure.

Open `group` first: it is the state machine of one group. `messages` holds requests and responses,
`members` the members, `subscribed_topics` the topics that they read. `assignors` assign partitions
to members. `former_members` remembers members across a restart of the broker.
"""
