"""Archiving: committed batches leave the log and become Parquet files.

Open `archiver` first: it decides which partitions are archived, and when (`schedule`). `run`
archives one file. `buffers` and `pieces` carry batches to the builder of the file (`builder`,
`file_maker`), which runs in its own process (`worker_process` on the broker's side, `worker_main`
on the other).
"""
