"""Examine a data directory without a broker and without changing a byte.

Open `directory` first: it reads the state of a directory. `segments` reads its batches as they
would be after recovery, `verify` checks every byte, `findings` are the values that both return.
"""
