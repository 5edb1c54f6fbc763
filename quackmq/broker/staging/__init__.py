"""Staging: atomic writes by any number of writers; nothing is visible before the commit.

Open `service` first. `stage` is one stage in memory, `stage_log` the format of its log, `committer`
copies its batches to their topics, `series` makes the batches of a stream exactly-once.
"""
