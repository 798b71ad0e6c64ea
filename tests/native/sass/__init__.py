"""What must be true of the compiled CUDA kernels, read from their machine code.

`disassembly` reads it, `kernels` says which kernels there are, `rules` what holds for each, and
`mutants` which defects of the sources each rule reports.
"""
