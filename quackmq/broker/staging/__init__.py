"""Staging: atomic writes by any number of writers; nothing is visible before the commit.

Open `service` first. `stage` is one stage in memory, `stage_log` the format of its log, `committer`
copies its batches to their topics, `series` lets each turn of a stream take effect once, `checks`
checks the arguments of calls.
"""
