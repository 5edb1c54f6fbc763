"""All history as Parquet: one row for each record, files by offset range, a manifest per partition.

The archive promises that a file is durable before the log deletes its records. To see how old
records are read, open `tiered_store` (log and archive as one store; `tiered_read` is one read over
both). To see how records are archived, open `archiving.archiver`.

    manifest           which files a partition has: values and pure functions
    manifest_registry  all manifests of a broker, and the only way to change them; `pins` keep files
    manifest_pointers  which manifest is valid in a store that brokers share
    partition_archive  the state of one archived partition in memory
    layout             directories and files on disk: durable, atomic, cleaned up
    prefetcher         reads ahead of a consumer, into `prefetch_buffer`
    parquet/           the format of files: rows, columns, checks
    archiving/         from the log to files
    merging/           from small files to large ones
"""
