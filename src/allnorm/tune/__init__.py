"""What is fastest on this machine, from how many tokens on.

`run.measure` starts ranks and returns what they measured, `table` makes the table out of it that
`allnorm.tuning` stores, `check` says how far the choice of `auto` is from the best algorithm.
"""
