"""`quackmq log` and `quackmq archive`: inspect a data directory, export it, and import Parquet
files.

Open `log_command` and `archive_command` first. `log_output` and `archive_output` print,
`archive_directory` reads an archive on disk, `archive_export` and `archive_import` copy records,
`parquet_source` reads Parquet files of any origin.
"""
