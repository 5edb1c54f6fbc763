"""The command line: one file a command, each with `add_parser(subparsers)` and `run(args) -> int`.

Exit codes: 0 done, 1 it could not be done (of `log`: damage was found), 2 what was asked for makes
no sense, 130 interrupted. What went wrong is one sentence on stderr.
"""
