"""Storage of the broker's data: one contract, several stores.

Open `contract` first: it says what every store promises. `core` keeps these promises over a medium,
where the data is durable: `local` stores everything in a directory, `postgres` in a database,
`memory` in memory for tests. `catalog` holds the topics, cursors and small state of each of them,
`delegating` is the base of stores that change some calls of another one.
"""
