"""Parquet files of the archive: how they are written and read.

Open `schema` first: it defines the columns. `rows` writes rows to a file, `from_batches` turns
record batches into rows, `reader` finds rows by offset and time, `to_batches` turns them back into
record batches, `checked_range` gives Parquet's reader only bytes whose checksum is right.
"""
