"""Checks the kernels for AMD GPUs (gfx942, gfx950). No GPU is needed.

`compiler` compiles kernels of the table in `csrc/gpu/kernel_table.cuh` to code objects,
`disassembly` reads their machine code, and `rules` contains the rules for each kernel. `mutants`
lists defects, each with the rule that must report it. `emulator` executes code objects.

    make amd AMD_ARGS="--arch gfx950 --only bfloat16 --only two_shot"

writes `build/amd/gfx950/bfloat16-two_shot.co`: one code object per dtype and kind, with a kernel
per world size, set of features and format, and `probe.co`. `compiler.Unit` names them in Python.
`native.sass.kernels.variant_of(symbol)` returns what a kernel is.

How a kernel is launched, which the code object's metadata repeats (`llvm-readelf-22 --notes`): a
block has a multiple of 32 threads and at least 128. The argument segment holds the parameters
(`FusedParams`, `OwnedRowsParams`, `LocalParams` or `ProbeParams`) at offset 0, as
`csrc/gpu/params.h` lays them out with `csrc/gpu/hip` on the include path, followed by HIP's hidden
arguments, of which kernels read the number of blocks and the block's size. Kernels read the segment
through its address, which is in the first two scalar registers of the kernel's user registers if
the descriptor asks for no others.
"""
