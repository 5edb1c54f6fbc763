"""What the `audit` pipeline checks, one module for each kind of evidence.

Open `runs` first: it checks offsets and producers' sequence numbers. `holes` explains offsets
without a record, and `receipts` checks what subscriptions have consumed.
`quackmq.spark.pipelines.audit` runs them on Spark.
"""
