"""Models of the protocols, explored exhaustively: litmus programs and state machines.

The steps come from the access table (`csrc/protocol/accesses.h`); C++ tests compare the table with
the kernels. `csrc` itself computes numbers and slot places (`arithmetic.py`). `exchange.py` joins
both. `ptx_program.py` creates litmus programs, and `ptx.py` decides which executions the memory
model allows. `counters.py` explores a state machine. `mutants.py` lists defects that must be found.
"""
