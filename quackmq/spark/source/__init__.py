"""Topics as Spark sources, in batch and as a stream.

Open `source` first. `options` parses the options of `format("quackmq")`, `columns` has the schema,
`offsets` the position of a query, `splits` cuts ranges into tasks, `filters` skips ranges that a
query does not need, and `task` reads a range (with `archived_files`, `decode` and `rows`).
"""
