"""Measurement of tuning tables: which algorithm is fastest for which number of tokens.

`run.measure` starts ranks and returns their measurements. `table` converts these to the table that
`allnorm.tuning` stores. `check` compares the choice of `auto` with the best algorithm.
"""
