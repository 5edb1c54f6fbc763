"""Retention: which records a topic keeps, and who may publish to a full one.

Open `service` first: it carries out the policies of topics. `facts` collects what a decision needs,
`partition` and `marks` remember the age and size of appends, `holds` says which records consumers
still need (`hold_order`, `hold_leases`, `blockers` are its parts).
"""
