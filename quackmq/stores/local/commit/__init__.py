"""How the local store commits: many callers share one frame of the journal and one sync.

Open `committer` first: it gathers changes and commits them cycle by cycle. `pending` divides
waiting changes into frames, `cycle` is one frame and its callers, `unsynced` counts the writes of
the weak sync modes, `write_back` moves batches from the journal to their files, `write_failure`
makes the store read-only. Meanwhile `checkpointer` makes checkpoints, with `checkpoint_capture` and
`checkpoint_writer`.
"""
