"""The archive as protocols see it: its files, plans that keep files, and replaced files.

Open `service` first: it lists files, and archives or replaces them on request. `plans` are leases
on the files of a topic: until a plan ends, its files are not removed.
"""
