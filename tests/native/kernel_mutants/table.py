"""The faults in the sources (`csrc/protocol/fault_switch.h`), with the tests that report them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SLOT_RACE = "race on workspace slot"
RACE = "ThreadSanitizer: data race"
WRONG = "elements wrong"
HANGS = "does not end"
NOT_EMPTY = "a slot is not empty"
WRONG_NUMBERS = "wrong numbers"
FAULT = "FAILED: fault"
SEEN = ": expected\n"
SLICES = STREAMS = "FAILED: fused, seed"
INPUT = "cuda_stream_input_test"
BOTH = "cuda_streams_input_test"
FEW = "cuda_few_blocks_test"
Build = Literal["plain", "thread"]


@dataclass(frozen=True)
class Fault:
    """A defect that a test must report.

    Attributes:
        name: The name of the fault's switch.
        report: Messages; the test must fail and print one of them.
        test: The program that reports the defect.
        build: "thread" with ThreadSanitizer, or "plain", with sequentially consistent memory.
    """

    name: str
    report: tuple[str, ...]
    test: str = "cuda_schedules_test"
    build: Build = "plain"


def _races(name: str, *report: str, test: str = "cuda_schedules_test") -> Fault:
    return Fault(name, report or (RACE,), test, "thread")


def _slots(name: str) -> Fault:
    return Fault(name, (SLOT_RACE,), build="thread")


def _wrong(name: str, *report: str, test: str = "cuda_schedules_test") -> Fault:
    return Fault(name, report or (WRONG,), test)


def _after_failure(name: str) -> Fault:
    return Fault(name, (WRONG_NUMBERS,), "cuda_faults_test")


def _access(name: str, test: str = "cuda_accesses_test") -> Fault:
    """Returns a fault that only the check of accesses finds, because results stay correct."""
    return Fault(name, ("seen",), test)


FAULTS = (
    # Returning slots.
    _slots("no_fence"),
    _slots("fence_after_number"),
    _slots("number_read_relaxed"),
    _slots("peers_not_waited_for"),
    _slots("number_of_an_earlier_half"),
    _wrong("operations_since_not_counted", HANGS),
    _wrong("equal_for_reached", HANGS),
    _wrong("compared_without_wrapping", HANGS),
    # Slot places.
    _slots("half_of_one_operation"),
    _slots("half_as_many_tags"),
    _slots("half_not_handed_back"),
    _slots("large_not_handed_back"),
    _slots("large_not_waited_for"),
    _slots("large_block_does_not_wait"),
    _races("one_large_phase", SLOT_RACE, WRONG),
    _wrong("one_unit", WRONG, HANGS, NOT_EMPTY),
    _wrong("slots_of_another_rank", WRONG, HANGS, NOT_EMPTY),
    # Slot contents.
    _wrong("one_word_tested"),
    _wrong("not_canonicalized", HANGS),
    _wrong("partials_not_cleared", WRONG, NOT_EMPTY),
    _wrong("received_not_cleared", WRONG, NOT_EMPTY),
    _access("sums_relayed_plainly"),
    _access("fence_on_the_data_path"),
    # Consecutive grids.
    _races("grid_not_waited_for"),
    _races("input_read_early"),
    _wrong("counter_read_early", WRONG, HANGS, NOT_EMPTY, "counter"),
    _races("counter_advanced_early"),
    _races("counters_of_blocks_advanced", RACE, WRONG, HANGS),
    # Synchronization within blocks and clusters.
    _wrong("any_lane_suffices"),
    _races("row_sums_without_barrier"),
    _races("one_buffer_of_row_sums"),
    _wrong("loaded_row_not_waited_for", test=FEW),
    _races("gains_used_early", test=FEW),
    _races("row_loaded_over_another", test=FEW),
    _races("team_sums_without_barrier", test=FEW),
    _races("maxima_of_teams_read_early", test=FEW),
    _races("row_sums_not_waited_for", RACE, "or of one that has ended"),
    _races("cluster_does_not_join"),
    _races("scales_sent_before_staged"),
    _races("greatest_read_early", test="cuda_local_test"),
    _races("greatest_of_x_read_early", test="cuda_local_test"),
    _races("greatest_overwritten", test="cuda_local_test"),
    _wrong("maxima_of_parts_read_early", test="cuda_wide_test"),
    # Sums of squares.
    _wrong("sums_sent_after_failure", "rank 1 has results", test="cuda_slices_test"),
    _wrong("sums_not_canonicalized", HANGS, test="cuda_slices_test"),
    _wrong("last_sum_not_awaited", SLICES, test="cuda_slices_test"),
    _wrong("sums_not_cleared", NOT_EMPTY, SLICES, test="cuda_slices_test"),
    _wrong("chunks_of_units_read_early", SLICES, test="cuda_slices_test"),
    _wrong("total_read_early", SLICES, test="cuda_slices_test"),
    _races("one_buffer_of_unit_sums", RACE, SLICES, test="cuda_slices_test"),
    # Residual streams.
    _races("segments_do_not_join", test=INPUT),
    _races("segments_not_waited_for", RACE, "FAILED: clusters", test=INPUT),
    _races("slots_added_early", test=INPUT),
    _races("sums_overwritten", test=INPUT),
    _races("squares_not_waited_for", RACE, "FAILED: clusters", test=INPUT),
    _races("segments_added_early", test=INPUT),
    _wrong("new_mix_not_transposed", "FAILED: blocks", test=INPUT),
    _wrong("mix_transposed", STREAMS, test="cuda_streams_test"),
    _races("mixed_early", test=BOTH),
    _races("slots_added_before_mixed", test=BOTH),
    _wrong("squares_to_one_block", HANGS, test=BOTH),
    # Schedules.
    _wrong("next_row_not_sent", HANGS),
    _wrong("turns_do_not_add_up", "ns after it is due", test="cuda_pace_test"),
    # Announcements and failures.
    _wrong("roll_call_does_not_wait", FAULT, test="cuda_faults_test"),
    _wrong("every_lane_names_who_is_missing", FAULT, test="cuda_faults_test"),
    _after_failure("sums_relayed_after_failure"),
    _after_failure("rows_published_after_failure"),
    _after_failure("packed_rows_published_after_failure"),
    _after_failure("partials_sent_after_failure"),
    _wrong(
        *("nvfp4_scale_zero_after_failure", "is not NaN after a failure", WRONG_NUMBERS),
        test="cuda_faults_test",
    ),
    # Arithmetic, and addresses of rows and bytes.
    _wrong("other_order_of_sums", test="cuda_kernels_test"),
    _wrong("maximum_of_the_wrong_chunks", test="cuda_kernels_test"),
    _wrong("partial_of_the_row_before"),
    _wrong("residual_of_the_row_before", test="cuda_local_test"),
    _wrong("half_of_the_residual_twice", test="cuda_kernels_test"),
    _wrong("nvfp4_elements_beside_nan", test="cuda_local_test"),
    _wrong("tile_padding_left", test="cuda_local_test"),
    _wrong("missing_choice_left_out", test="cuda_local_test"),
    _wrong("choices_of_the_first_launch"),
    # Islands.
    _wrong("island_sums_rounded", test="cuda_islands_test"),
    _wrong("island_sums_published", NOT_EMPTY, HANGS, WRONG, test="cuda_islands_test"),
    _wrong("last_island_left_out", test="cuda_islands_test"),
    # Rows that are not gathered.
    _wrong("kept_rows_published", NOT_EMPTY, HANGS, WRONG),
    # The probe of a new workspace.
    _wrong("last_peer_not_probed", " of rank ", test="cuda_probe_test"),
    _wrong("probe_word_of_another", " of rank ", test="cuda_probe_test"),
    # The host side under HIP's names.
    _wrong("hip_cached_workspace", "a workspace is cached", test="hip_host_calls_test"),
    # The CPU backend.
    _access("cpu_published_relaxed", "cpu_accesses_test"),
    _access("cpu_published_before_rows", "cpu_accesses_test"),
    _access("cpu_step_not_waited_for", "cpu_accesses_test"),
)

# Faults that the protocol models report, and faults that the machine code rules report.
OF_MODELS = ("first_tag_word_not_tested", "second_tag_word_not_tested", "one_pull_phase")
OF_MACHINE_CODE = (
    *("peers_polled_one_by_one", "counters_advanced_by_atomics", "cluster_meets_for_each_row"),
    *("dependents_let_in_early", "fault_status_not_fenced", "registers_spilled"),
)
# Faults of the leaf for AMD GPUs, and of code that only they run (tests/native/amd).
OF_AMD_CODE = (
    *("device_scope", "others_polled_one_by_one", "parameters_copied"),
    "write_back_not_waited_for",
)
