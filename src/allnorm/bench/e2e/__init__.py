"""End-to-end benchmark of a transformer: compares speed and tokens, fused and unfused.

`report.measure` starts ranks and returns results. `run` holds the code that runs in the ranks.
"""
