"""Kafka's classic group protocol: JoinGroup, SyncGroup, Heartbeat, LeaveGroup. Pure.

Open `group` first: it is the state machine of one group. `messages` holds requests and responses,
`members` the members, `stored_members` what survives a restart, and `subscription_metadata` reads
the topics from a consumer's subscription.
"""
