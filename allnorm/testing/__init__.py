"""Tools to verify allnorm on a machine: start ranks, compare bits, make inputs, time calls."""

from allnorm.testing.bits import assert_same_bits, same_bits, ulp_distance
from allnorm.testing.inputs import (
    SENTINEL_WORDS,
    SPECIAL_KINDS,
    all_inputs,
    rank_input,
    sentinel_input,
    shared_input,
    special_input,
)
from allnorm.testing.rank import report
from allnorm.testing.spawn import RankError, RankPool, run_ranks
from allnorm.testing.timing import (
    Timing,
    calls_per_graph,
    max_over_ranks,
    time_cpu,
    time_cuda_graph,
)

__all__ = [
    "SENTINEL_WORDS",
    "SPECIAL_KINDS",
    "RankError",
    "RankPool",
    "Timing",
    "all_inputs",
    "assert_same_bits",
    "calls_per_graph",
    "max_over_ranks",
    "rank_input",
    "report",
    "run_ranks",
    "same_bits",
    "sentinel_input",
    "shared_input",
    "special_input",
    "time_cpu",
    "time_cuda_graph",
    "ulp_distance",
]
