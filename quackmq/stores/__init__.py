"""Where the broker keeps its data: one contract, several stores.

Open `contract` first: it says what every store promises. `local` keeps everything in a directory,
`memory` in memory for tests, and `catalog` is what all of them know about topics, cursors and small
state.
"""
