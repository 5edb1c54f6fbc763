"""Topics as Spark reads them, in batch and as a stream.

Open `source` first. `options` are the options of `format("quackmq")`, `columns` the schema,
`offsets` where a query is, `splits` cuts ranges into tasks, `filters` leaves out what a query does
not need, and `task` reads a range (`archived_files`, `decode`, `rows` are its parts).
"""
