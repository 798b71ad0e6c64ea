"""Measurement of tuning tables: which algorithm is fastest at each number of tokens.

`run.measure` starts ranks and returns their measurements. `table` converts these to the table that
`allnorm.tuning` stores. `check` compares the algorithm that `auto` chooses with the best algorithm.
"""
