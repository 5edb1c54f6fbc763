"""What every protocol's server shares: sockets, admission, memory bounds, slow peers, closing.

A protocol is a codec and its handlers; everything about connections that does not depend on what
they say is here, once. Open `first_bytes` first: it recognises a peer that came to the wrong port.
"""
