"""How the Python client reads a topic and stores its progress.

Open `consumer` first. `progress` tracks which messages are buffered, in hand and done, `commits`
sends progress to the broker, `position_file` and `directory` store it on disk, `start` decides
where reading starts, and `browse` reads without a name.
"""
