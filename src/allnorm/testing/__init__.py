"""Tools to verify allnorm on a machine: starting ranks, comparing bits, inputs, and timing."""

from allnorm.testing.agreement import RankFailedError, agree, all_or_none, gather, start_together
from allnorm.testing.bits import assert_same_bits, describe_difference, same_bits, ulp_distance
from allnorm.testing.inputs import (
    DTYPES,
    SENTINEL_WORDS,
    SPECIAL_KINDS,
    Batch,
    all_inputs,
    copy_all,
    make_batch,
    rank_input,
    sentinel_input,
    shared_input,
    special_input,
)
from allnorm.testing.rank import report
from allnorm.testing.spawn import OnMessage, RankError, RankPool, run_ranks
from allnorm.testing.timing import (
    Timing,
    calls_per_graph,
    capture,
    max_over_ranks,
    time_cpu,
    time_cuda_graph,
)

__all__ = [
    "DTYPES",
    "SENTINEL_WORDS",
    "SPECIAL_KINDS",
    "Batch",
    "OnMessage",
    "RankError",
    "RankFailedError",
    "RankPool",
    "Timing",
    "agree",
    "all_inputs",
    "all_or_none",
    "assert_same_bits",
    "calls_per_graph",
    "capture",
    "copy_all",
    "describe_difference",
    "gather",
    "make_batch",
    "max_over_ranks",
    "rank_input",
    "report",
    "run_ranks",
    "same_bits",
    "sentinel_input",
    "shared_input",
    "special_input",
    "start_together",
    "time_cpu",
    "time_cuda_graph",
    "ulp_distance",
]
