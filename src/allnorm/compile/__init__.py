"""Fuses all-reduce, residual add and RMSNorm in FX graphs; results stay the same.

`fuse` rewrites a graph from Dynamo, `torch.fx`, AOTAutograd or Inductor. `inductor_pass` does the
same as an Inductor pass. Both return a `FusionReport` that lists every reduction, fused or not.
`block_scaled` declares that a framework's operator quantizes to MXFP8 or NVFP4.
"""

from allnorm.compile.block_scaled import block_scaled
from allnorm.compile.fusion import fuse
from allnorm.compile.inductor import inductor_pass
from allnorm.compile.report import FusionReport, Site

__all__ = ["FusionReport", "Site", "block_scaled", "fuse", "inductor_pass"]
