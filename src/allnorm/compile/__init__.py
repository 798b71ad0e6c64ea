"""Finds all-reduce, residual add and RMSNorm in FX graphs, and fuses them without other results.

`fuse` rewrites a graph of Dynamo, `torch.fx`, AOTAutograd or Inductor; `inductor_pass` is the same
as a pass of Inductor. Both say in a `FusionReport` what became of every reduction. `block_scaled`
says of a framework's operator that it quantises to MXFP8 or NVFP4.
"""

from allnorm.compile.block_scaled import block_scaled
from allnorm.compile.fusion import fuse
from allnorm.compile.inductor import inductor_pass
from allnorm.compile.report import FusionReport, Site

__all__ = ["FusionReport", "Site", "block_scaled", "fuse", "inductor_pass"]
