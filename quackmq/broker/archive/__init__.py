"""The archive as protocols see it: its files, plans that keep files, and replaced files.

Open `service` first. `plans` are leases on the files of a topic.
"""
