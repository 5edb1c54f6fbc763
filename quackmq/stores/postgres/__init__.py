"""A store in a PostgreSQL database, of which one broker at a time is the owner.

Open `ownership` first: it says how one broker becomes active and how another takes over. `store`
opens a store, `medium` commits its cycles and `reads` returns old batches; `statements` has the SQL
of a cycle. `owner_session` keeps the writing session, `connection` opens one and refuses a database
in which nothing durable can be kept. `schema` creates and migrates the tables, whose definitions
with comments are in `migrations/`.
"""
