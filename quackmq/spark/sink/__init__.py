"""Write DataFrames and streams to topics, exactly once.

Open `sink` first: it holds the two writers that Spark calls. `options` parses their options.
`encode` turns rows into record batches. `partitioner` chooses the same partitions as every other
producer. `write_ids` and `digest` recognise a repeated write.
"""
