"""Planted bugs: does the suite notice them?

Each `*.toml` file here lists small, realistic bugs in one package: a place in the source, the text
to replace, and the tests that should fail then. `python -m tests.mutants` (`make mutants`) plants
them one at a time in a copy of the source tree, runs those tests, and prints the score. Open
`plan.py` first for the format; `__main__.py` runs the plan.
"""
