"""`quackmq experiment`: a broker, publishers and subscribers, and whether the accounts agree.

Open `command` first, then `plan` (what an experiment is) and `runner` (how it is carried out).
`peer` is a publisher or subscriber in a process of its own (`peer_process`), `report`, `latency`,
`plot` and `progress` show what came of it.
"""
