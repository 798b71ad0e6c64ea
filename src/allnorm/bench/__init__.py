"""Speed of the fused op beside other ways: every arm is checked, then timed.

`report.measure` starts ranks and returns measurements; `compare` and `floor` say more of them. What
runs in the ranks is in `run`.
"""
