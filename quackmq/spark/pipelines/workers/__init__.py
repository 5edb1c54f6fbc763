"""Processes that pipelines start beside Spark.

`processes` starts, watches and stops them. `simulation` and `stress` are the programs they run.
"""
