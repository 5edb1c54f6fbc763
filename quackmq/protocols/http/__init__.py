"""HTTP: the `/v1` API and the endpoints of the distributed queue.

Open `server` first (admission and shared state), then `connection` (one peer: requests in,
responses out, in order), `parser` (bytes to requests), `browser_guards` (requests that a foreign
web page must not make), `types` and `router` (the handlers' view), `queue_api` and `v1/` (the
handlers).
"""
