"""Retention: which records a topic keeps, and which publishers may write to a full topic.

Open `service` first: it carries out the policies of topics. `publisher_queues` lets publishers wait
for room, `facts` collects the facts for a decision, `partition` and `marks` remember the age and
size of appends, `holds` says which records consumers still need (`hold_order`, `hold_leases`,
`blockers` are its parts).
"""
