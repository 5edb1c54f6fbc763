"""Storage of the broker's data: one contract, several stores.

Open `contract` first: it says what every store promises. `local` stores everything in a directory,
`memory` in memory for tests. `catalog` holds the topics, cursors and small state of each of them,
`append_checks` checks batches before they are appended, `delegating` is the base of stores that
change some calls of another one.
"""
