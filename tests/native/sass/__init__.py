"""Checks of the machine code of the CUDA kernels.

`disassembly` reads machine code, `kernels` lists the kernels, `rules` has the rules for each
kernel, and `mutants` the defects of the sources that each rule must report.
"""
