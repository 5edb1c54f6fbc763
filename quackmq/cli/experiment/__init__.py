"""`quackmq experiment`: run a broker with publishers and subscribers, and check that no entry is
lost.

Open `command` first, then `plan` (the parameters of an experiment) and `runner` (which performs
it). `peer` is the program of a publisher or subscriber, `peer_process` controls its process, and
`program` controls a program of the user. `accounts` collects the counts, `archive_check` compares
the archive with them, and `report`, `latency`, `plot` and `progress` show the results.
"""
