"""The protocols that the broker serves, each in its own package.

A package holds the codec (bytes to values, no I/O), the server (admission and shared state), the
connection (one peer) and the handlers. Packages do not import each other. Open the `server` of a
protocol first. The code that servers and connections share is in `quackmq.serving`.
"""
