"""Checks that calls are bit-exact on this machine, and that ranks notice when a peer fails.

`run.verify` starts ranks and runs the checks in them, `faults.run` provokes faults, and `doctor`
runs a quick check.
"""
