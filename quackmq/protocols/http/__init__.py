"""HTTP: the dashboard, the metrics, the `/v1` API and the endpoints of the distributed queue.

Open `server` first (who may connect, what connections share), then `connection` (one peer: requests
in, answers out, in order), `parser` (bytes to requests), `browser_guards` (what a web page must not
be able to ask), `types` and `router` (what handlers see), `queue_api` and `v1/` (the handlers).
"""
