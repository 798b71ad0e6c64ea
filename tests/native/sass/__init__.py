"""Checks the CUDA kernels' machine code.

`disassembly` reads machine code, `kernels` lists the kernels, and `rules` contains the rules for
each kernel. `mutants` lists defects in the sources, each with the rule that must report it.
"""
