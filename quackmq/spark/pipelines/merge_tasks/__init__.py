"""The `compact` pipeline's work: `plan` keeps the files of a topic, `task` is one merge."""
