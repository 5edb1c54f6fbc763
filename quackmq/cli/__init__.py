"""The command line: one module per command, each with `add_parser(subparsers)` and `run(args) ->
int`.

Exit codes: 0 success, 1 failure (for `log` and `archive`: damage was found), 2 invalid arguments,
130 interrupted by Ctrl-C. An error is one sentence on stderr. Open `main` first.
"""
