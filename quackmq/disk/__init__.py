"""All access to the disk, behind an interface that the simulation implements too.

`interface` is the contract: a few blocking operations with the semantics of POSIX. `real`
implements it and runs operations in side threads. `syncing` makes bytes durable with the calls that
the system has. `linux_aio` syncs without a thread. `loop_sync` decides whether the event loop may
wait for a sync itself. `mapped_reads` reads large ranges without a copy.
"""
