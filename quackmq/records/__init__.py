"""Record batches: the one format in memory, on disk and on the Kafka wire.

A batch is passed on as the bytes that a producer sent. Only `codec` and `columns` look at single
records. Open `batch` first: it draws the header. `codec` reads and builds records, `columns` turns
batches into Arrow columns, `inflate` decompresses within a bound, `crc_join` joins checksums.
"""
