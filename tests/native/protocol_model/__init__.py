"""The protocols as models: litmus programs under memory models, and counters explored exhaustively.

`source.py` reads the protocol out of `csrc`; `ptx_program.py` and `counters.py` make programs and
machines of it; `ptx.py` and `cpp.py` say which executions their memory models allow.
"""
