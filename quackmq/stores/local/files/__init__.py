"""The files of the local store, one module for each kind, and their formats.

Open `format` first: it draws the bytes of every file. `journal` is the commit point, `checkpoint`
the state at one frame, `segment` the batches of one partition. `packs` and `extents` are the files
that many small partitions share; `open_files` bounds the number of open files.
"""
