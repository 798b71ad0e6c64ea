"""Executes code objects for AMD GPUs, instruction by instruction, without a GPU.

The emulator is a C++ program (`wave.h`, `memory.h` and `machine.h` are its parts), because the long
run executes billions of instructions. Python reads the instructions from llvm-objdump's text
(`code_object`), and starts runs (`machine`).

Each instruction has one entry in a table: `scalar.cpp`, `vector.cpp`, `floats.cpp`, `accesses.cpp`.
A test of its own compares it with results computed in Python. An instruction without an entry stops
the run with its name.

A run depends on its seed alone. The seed chooses which wave runs, when accesses to memory take
effect, in which parts, and the last bit of approximate instructions. Not emulated: the delays that
some instructions need between them (s_nop), the limits of registers and of blocks per GPU, and the
time that anything takes.
"""
