"""Reading the log: batches, offsets and single committed records.

Open `page` first for reads by offset. `next_message` finds the next record of a subscription. Both
use `scanner`, which leaves out aborted transactions. `decoded_batches` caches opened batches,
`live_reads` serves the newest records, `time_lookup` and `epoch_lookup` find offsets by time and
leader epoch.
"""
