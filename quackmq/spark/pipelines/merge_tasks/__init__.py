"""Merge archive files in Spark tasks, for the `compact` pipeline.

Open `plan` first: it pins the files of a topic, so that the broker keeps them while Spark works.
`task` merges one group of files. The `compact` pipeline offers the result to the broker, which
checks it before it replaces anything.
"""
