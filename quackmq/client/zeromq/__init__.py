"""Parts of the ZeroMQ clients, `quackmq.client.zmq` and `quackmq.client.proxy`.

`req_socket` sends one request and returns its answer in time, `last_ids` keeps the last ids on
disk, `receiver` is the receiving half of a reliable subscriber, `received_offsets` what it has
finished.
"""
