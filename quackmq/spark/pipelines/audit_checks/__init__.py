"""Checks of the `audit` pipeline, one module for each kind of evidence.

Open `runs` first: it checks offsets and producers' sequence numbers. `holes` explains offsets
without a record, and `receipts` checks which records subscriptions have received.
`quackmq.spark.pipelines.audit` runs these checks on Spark.
"""
