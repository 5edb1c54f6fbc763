"""What every protocol's server shares: sockets, admission, memory bounds, slow peers, closing.

A protocol is a codec and its handlers; everything about connections that does not depend on what
they say is here, once. Open `server` first: it listens, admits and closes; then `connection`.
"""
