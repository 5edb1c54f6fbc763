"""`quackmq log` and `quackmq archive`: look into a data directory, export it, import Parquet files.

Open `log_command` and `archive_command` first. `log_output` and `archive_output` print,
`archive_directory` reads an archive as it lies on disk, `archive_export` and `archive_import` copy
records, `parquet_source` reads anybody's Parquet files.
"""
