"""The connection layer that all protocols share: listeners, admission, memory budgets, closing.

A protocol adds a codec and its handlers. Code about connections that does not depend on the
protocol is here, once. Open `server` first: it listens, admits connections and closes them. Then
open `connection`. `pipes` and `unix_socket` serve a peer that does not use TCP.
"""
