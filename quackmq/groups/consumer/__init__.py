"""Kafka's newer group protocol (KIP-848): one heartbeat request carries everything. Pure.

Open `group` first: it is the state machine of one group. `messages` holds what members and the
group say to each other, `members` the members, `assignors` decide who reads which partition, and
`former_members` remembers members across a restart of the broker.
"""
