"""Processes that pipelines start beside Spark.

Open `processes` first: it starts, watches and stops them. `simulation` and `stress` are the
programs that the processes run, for the pipelines `simulate` and `metrics`.
"""
