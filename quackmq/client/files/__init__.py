"""Small files that clients keep on disk.

`durable` replaces a file so that a crash leaves the old content or the new one. `own_directory` is
a directory that one process uses at a time.
"""
