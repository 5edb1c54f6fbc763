"""Archiving: committed batches leave the log and become Parquet files.

Open `archiver` first: it decides what is archived, and when (`schedule`). `run` archives one file,
`buffers` and `pieces` carry batches to where a file is made (`builder`, `file_maker`), which is a
process of its own (`worker_process` on the broker's side, `worker_main` on the other).
"""
