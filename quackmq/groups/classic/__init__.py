"""Kafka's classic group protocol: JoinGroup, SyncGroup, Heartbeat, LeaveGroup. Pure.

Open `group` first: it is the state machine of one group. `messages` holds what members and the
group say to each other, `members` the members, `stored_members` what survives a restart, and
`subscription_metadata` reads the topics out of a consumer's subscription.
"""
