"""A whole transformer, fused against unfused: as fast, and the same tokens?

`report.measure` starts ranks and returns results; what runs in the ranks is in `run`.
"""
