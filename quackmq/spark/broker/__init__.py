"""What Spark's driver and tasks ask the broker.

Open `http` first: one request and one answer on a kept connection. `metadata` asks for topics and
offsets, `archive` for archived files, `staging` writes and commits the parts of a sink, `progress`
makes a streaming query visible as a consumer group.
"""
