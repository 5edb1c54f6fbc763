"""The door for everything that speaks HTTP.

Read in this order: `server` (the door: who may come in, what connections share), `connection` (one
peer: requests in, answers out, in order), `guards` (what a browser must not be made to ask),
`values` and `routes` (what handlers see), then the handlers: `queue` (the distributed queue's
endpoints) and `v1` (the modern interface).
"""
