"""Values and rules that need no clock, disk or network: topics, policies, leases, transactions.

Everything here is pure: a function of its arguments, or a state machine that is told what happens.
Open `topic` first for the values that all packages exchange. `policy` holds the settings of topics,
`leases` and `subscription` the rules of delivery, `producer_state`, `log_transactions` and
`transactional_id` those of exactly-once publishing, `partitioning` the partition of a key.
"""
