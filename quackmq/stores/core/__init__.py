"""The part of a store that is the same wherever the data lies.

`store` implements `quackmq.stores.contract`: open it first. `append_checks` checks batches,
`committer` gathers the changes of all callers into cycles (`pending`), and makes them visible when
they are durable. `partition_log` has one partition's state in memory, `chunk` its batches, `tail`
the recent ones of all partitions, `reads` reads there first, `waiters` wakes readers. Where data is
stored is a `medium`: each store has its own.
"""
