"""Record batches: the one format in memory, on disk and on the Kafka wire.

The broker passes a batch on as the bytes that a producer sent. Only `codec` and `columns` decode
single records. Open `batch` first: it draws the header. `codec` reads and builds records, `columns`
turns batches into Arrow columns, `column_encoding` encodes columns as parts of records, `inflate`
decompresses within a bound, `crc_join` joins checksums.
"""
