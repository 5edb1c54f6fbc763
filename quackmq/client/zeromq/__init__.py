"""Parts of the ZeroMQ clients, `quackmq.client.zmq` and `quackmq.client.proxy`.

`req_socket` sends a request and returns its answer within a timeout, `last_ids` stores the last ids
on disk, `receiver` is the receiving half of a reliable subscriber, and `received_offsets` stores
the messages that it has processed.
"""
