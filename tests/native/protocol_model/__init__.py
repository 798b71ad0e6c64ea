"""Models of the protocols: litmus programs under memory models, and state machines, all explored.

The steps come from the table of accesses (`csrc/protocol/accesses.h`), which C++ tests compare with
the kernels. Numbers and slot places are computed by `csrc` itself (`arithmetic.py`). `exchange.py`
combines them. `ptx_program.py` makes litmus programs, and `ptx.py` decides which executions the
memory model allows. `counters.py` explores a state machine. `mutants.py` lists defects that must be
found.
"""
