"""How the local store commits: a cycle of the core is one frame of the journal, and one sync.

Open `cycle` first: it is one frame with its batches, which `LocalMedium` writes. `unsynced` counts
the writes of the weak sync modes, `write_back` moves batches from the journal to their files.
Meanwhile `checkpointer` makes checkpoints, with `checkpoint_capture` and `checkpoint_writer`.
"""
