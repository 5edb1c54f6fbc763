"""Merges of archive files that the `compact` pipeline runs as Spark tasks.

Open `plan` first: it pins the files of a topic, so that the broker keeps them while Spark works.
`task` merges one group of files and offers the result to the broker, which checks it before it
replaces anything.
"""
