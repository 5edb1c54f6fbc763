"""All history as Parquet: one row a record, files by offset range, one manifest a partition.

    disk        what all of it stands on, and what a simulation replaces
    schema      the columns, and what stands behind the row groups of a file
    writer      committed batches → the bytes of a file
    manifest    which files a partition has: values and pure functions
    files       a partition's directory: durable, atomic, swept
    encoding    rows → batches, as consumers want them
    reader      offsets and times → batches, by row group

Nothing here decides when anything is archived, merged or let go of: that is the broker's.
"""
