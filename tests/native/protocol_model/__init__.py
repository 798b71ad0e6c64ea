"""The protocols as models: litmus programs under memory models, and counters explored exhaustively.

Steps come from the table of accesses (`csrc/protocol/accesses.h`), which C++ tests compare with
what the kernels do; numbers and places of slots are functions of `csrc` (`arithmetic.py`).
`exchange.py` joins them; `ptx_program.py` and `counters.py` make programs and machines of that;
`ptx.py` says which executions the memory model allows. `mutants.py` has defects that must be found.
"""
