"""How the Python client reads a topic, and how it remembers what a program has been given.

Open `consumer` first. `progress` knows which messages are waiting and which are in hand, `commits`
sends progress to the broker, `position_file` and `directory` keep it on disk, `start` says where
reading begins, and `browse` reads without a name.
"""
