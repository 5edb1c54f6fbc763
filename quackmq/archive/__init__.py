"""All history as Parquet: one row a record, files by offset range, one manifest a partition.

    schema      the columns, and what stands behind the row groups of a file
    manifest    which files a partition has: values and pure functions
    files       a partition's directory: durable, atomic, swept
    rows        rows → a file, wherever its bytes go
    writer      committed batches → rows → the bytes of a file
    encoding    rows → batches, as consumers want them
    reader      offsets and times → batches, by row group; `ahead` of who reads on
    partitions  all manifests of a broker, pins, changes one by one
    tiered      log and archive as one store; `reading` is its way to read
    archiver    what goes into the archive when; `due`, `buffers`, `turn`, `making` and the workshop
                are its parts
    merging     which files should become one: pure; `merger` carries it out
    offered     files that others made in the place of some: examined and compared

Who wants to know how old news is read begins with `tiered`; how it gets here, with `archiver`.
"""
