"""How commands start and describe a broker.

Open `runner` first: it puts store, broker and protocols together. `settings` reads options, the
environment and the TOML file, `address` parses addresses, `process` sets the process up,
`collector` keeps the garbage collector from stopping the loop, `closing` says how long a stop may
take.
"""
