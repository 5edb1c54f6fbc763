"""A store in a PostgreSQL database, of which one broker at a time is the owner.

Open `ownership` first: it says how one broker becomes active and how another takes over. `schema`
creates and migrates the tables, whose definitions with comments are in `migrations/`. `connection`
opens a session and refuses a database in which nothing durable can be kept.
"""
