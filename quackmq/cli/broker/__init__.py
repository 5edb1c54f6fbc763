"""Start and configure a broker for a command.

Open `runner` first: it puts store, broker and listeners together. `settings` reads options,
environment variables and the TOML file, `address` parses addresses, `topic_defaults` the defaults
of new topics, `process` configures the process, `collector` keeps the garbage collector from
stopping the loop, and `closing` decides how long a shutdown may take. `requests` asks a broker that
is running elsewhere, and `topic_defaults_command` sets its defaults of new topics.
"""
