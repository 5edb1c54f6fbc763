"""Send the requests of Spark's driver and tasks to the broker.

Open `http` first: it sends one request at a time on one kept connection. `metadata` asks for topics
and offsets, and `archive` for archived files. `staging` writes and commits the parts of a sink.
`progress` makes a streaming query visible as a consumer group.
"""
