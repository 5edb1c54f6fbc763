"""ZeroMQ: PUT, GET, SUB and UNSUB over REQ sockets, and a reliable proxy for PUB and SUB sockets.

Open `server` first (admission, state shared by peers), then `connection` (one peer, whatever its
socket type), `rep_connection` (a peer that sends requests), `queue_handlers` (what each request
does) and `proxy/`. `codec/` reads and writes ZMTP and the text of requests.
"""
