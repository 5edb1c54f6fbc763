"""DataFrames and streams written to topics, exactly once.

Open `sink` first. `options` are its options, `encode` turns rows into record batches, `partitioner`
chooses partitions as every other producer does, `write_ids` and `digest` recognise a repeated
write.
"""
