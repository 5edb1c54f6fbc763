"""Values and rules that need no clock, disk or network: topics, policies, leases, transactions.

Everything here is pure: functions of their arguments, and state machines without I/O.
Open `topic` first for the values that all packages exchange. `policy` holds the settings of topics,
`leases` and `subscription` the rules of delivery, `producer_state`, `log_transactions` and
`transactional_id` those of exactly-once publishing, `partitioning` the partition of a key, `agenda`
keys that are due at some time. `stored_json` decodes small stored states.
"""
