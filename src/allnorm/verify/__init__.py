"""Is every call right on this machine, bit for bit, and is a rank that fails noticed?

`run.verify` starts ranks and runs the checks in them, `faults.run` provokes faults, `doctor`
takes a quick look.
"""
