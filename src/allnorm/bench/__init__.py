"""Benchmarks of the fused op and of other implementations: each is checked, then timed.

`report.measure` starts ranks and returns measurements. `compare` compares them with earlier ones,
`floor` computes the lower bound set by the link. `run` holds the code that runs on the ranks.
"""
