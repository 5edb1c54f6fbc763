"""Merging: small files of the archive become large ones.

Open `planner` first: a pure function says which files should become one. `merger` carries the plans
out inside the broker, `merge` is one merge step by step, and `replacement` checks files that others
made in the place of archived ones.
"""
