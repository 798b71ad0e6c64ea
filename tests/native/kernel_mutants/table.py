"""Defects of the CUDA kernels as edits of their headers, and what must be reported of each."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Literal

from native import kernel_edits as edits
from native.kernel_edits import EXCHANGE, ONE_SHOT, OWNED, ROW_OWNERS, SLOT, SLOTS, TWO_SHOT, Edits

ROW_EXCHANGE, E4M3, FUSED, ANY_ROWS, LOCAL_ROWS, PACE = (
    f"gpu/{name}.cuh"
    for name in ("row_exchange", "formats/e4m3", "fused", "any_rows", "local_rows", "pace")
)
EXPERTS, PREPARE = "gpu/sources/expert_rows.cuh", "gpu/prepare.h"
ISLAND_SUMS = "gpu/sources/island_sums.cuh"
NVFP4, TILES = "gpu/formats/nvfp4.cuh", "gpu/formats/tiles.cuh"

SLOT_RACE = "race on workspace slot"
RACE = "ThreadSanitizer: data race"
WRONG = "elements wrong"
HANGS = "does not end"
LATE = "ns after it is due"
WRONG_NUMBERS = "wrong numbers"
NOT_EMPTY = "a slot is not empty"
MISSING, PROBE_TEST = " of rank ", "cuda_probe_test"

Build = Literal["plain", "thread"]


@dataclass(frozen=True)
class Mutant:
    """A defect: texts of files under csrc/, each to be found once, and what to put there instead.

    Attributes:
        name: What is wrong.
        edits: (file, text, replacement).
        report: One of these must be reported, and the test must fail.
        build: With ThreadSanitizer ("thread") or, over sequentially consistent memory, without.
        test: The program that reports it.
        short: Whether CI tries it in every run.
    """

    name: str
    edits: Edits
    report: tuple[str, ...]
    build: Build = "thread"
    test: str = "cuda_schedules_test"
    short: bool = True

    def edited(self, sources: pathlib.Path) -> dict[str, str]:
        """The files below `sources` that it changes, with the defect, by name.

        Raises:
            LookupError: a text is not in its file once.
        """
        files: dict[str, str] = {}
        for name, old, new in self.edits:
            text = files.get(name) or (sources / name).read_text()
            if text.count(old) != 1:
                raise LookupError(
                    f"csrc/{name} holds {text.count(old)} times, not once, the text\n{old}"
                    "Has it changed? Then the mutant must change with it."
                )
            files[name] = text.replace(old, new)
        return files


_SHARED = "      if (lane == 0) store_shared(shared_ + at, chunk_value);\n      __syncthreads();\n"
_OWN_BARRIER = "  __syncthreads();  // every thread has read the operation counter"
_ADVANCE = "    // After the barrier in add_row().\n    if (last) exchange_.advance();\n"
_NO_ROW_BARRIER = "  exchange.advance_unused();\n  __syncthreads();\n"
_LARGE_BARRIER = "    // nobody waits for it for ever.\n    __syncthreads();\n"
_SEND_NOT_SENT = "      if (!sent) send_next();\n"
_PREFETCHED_SEND = "      } else {\n        pace.wait();\n        send(row + step_, ahead);\n"
_CLEAR_TWO_SHOT = "    clear_partials(exchange_, slot(row), stride_);\n"
_CLEAR_OWNED = "    if (live_) clear_partials(exchange_, slot, stride);\n"
_STAGED = "    // thread comes here again: the sum over the next row lies in between.\n"

# What weaker memory does, and threads that do not wait for each other: ThreadSanitizer reports it.
RACES = (
    Mutant("hand back: no fence", edits.NO_FENCE, (SLOT_RACE,)),
    Mutant("hand back: fence of the GPU", edits.FENCE_OF_GPU, (SLOT_RACE,)),
    Mutant(
        "hand back: no release, fenced after the number is stored",
        edits.PUBLISHED_BEFORE_FENCE,
        (SLOT_RACE,),
    ),
    Mutant(
        "hand back: the number is read without acquire",
        edits.READ_RELAXED,
        (SLOT_RACE,),
    ),
    Mutant("hand back: peers are not waited for", edits.PEERS_NOT_WAITED_FOR, (SLOT_RACE,)),
    Mutant(
        "hand back: an earlier number suffices",
        edits.REACHED_EARLIER,
        (SLOT_RACE,),
    ),
    Mutant(
        "hand back: the number of the next operation is stored",
        edits.PUBLISHED_AS_NEXT,
        (SLOT_RACE,),
        short=False,
    ),
    Mutant("halves of one operation", edits.HALF_OF_ONE_OPERATION, (SLOT_RACE,)),
    Mutant("half as many slots of tags", edits.HALF_AS_MANY_TAGS, (SLOT_RACE,), short=False),
    Mutant("a half begun and nothing handed back", edits.HALF_NOT_HANDED_BACK, (SLOT_RACE,)),
    Mutant(
        "large operation: slots are not waited for",
        edits.LARGE_NOT_WAITED_FOR,
        (SLOT_RACE,),
    ),
    Mutant(
        "large operations hand nothing back",
        edits.LARGE_NOT_HANDED_BACK,
        (SLOT_RACE,),
        short=False,
    ),
    Mutant(
        "large operation: the block's other threads do not wait",
        ((EXCHANGE, _LARGE_BARRIER, _LARGE_BARRIER.replace("    __syncthreads();\n", "")),),
        (SLOT_RACE,),
    ),
    Mutant(
        "one large phase",
        edits.ONE_LARGE_PHASE,
        (SLOT_RACE, WRONG),
        short=False,
    ),
    Mutant(
        "the preceding grid is not waited for",
        edits.PRECEDING_GRID_NOT_WAITED_FOR,
        (RACE,),
    ),
    Mutant(
        "x is read before the preceding grid is complete",
        (
            (
                FUSED,
                "  Exchange<kWorldSize> exchange(params);\n",
                "  const Pack early = live && first >= 0 ? load_pack(params.x.at(first, pack))"
                " : Pack{};\n  Exchange<kWorldSize> exchange(params);\n",
            ),
            (
                FUSED,
                "const Pack own = live && first >= 0 && first < end ? source.load(first) : Pack{};",
                "const Pack own = early;",
            ),
        ),
        (RACE,),
    ),
    Mutant(
        "the counter is advanced before a block's threads have read it: owned rows",
        ((OWNED, _OWN_BARRIER, "  // every thread has read the operation counter"),),
        (RACE,),
    ),
    Mutant(
        "the counter is advanced before a block's threads have read it: no row",
        ((FUSED, _NO_ROW_BARRIER, _NO_ROW_BARRIER.replace("  __syncthreads();\n", "")),),
        (RACE,),
        short=False,
    ),
    Mutant(
        "the counter is advanced before a block's threads have read it: fused",
        (
            (
                FUSED,
                "    epilogue_.add_row(row, reduced);\n" + _ADVANCE,
                _ADVANCE + "    epilogue_.add_row(row, reduced);\n",
            ),
        ),
        (RACE,),
        short=False,
    ),
    Mutant(
        "counters that blocks of the grid may still read are advanced with the unused ones",
        (
            (
                EXCHANGE,
                "int copy = gridDim.x + blockIdx.x + threadIdx.x * gridDim.x;",
                "int copy = blockIdx.x + threadIdx.x * gridDim.x;",
            ),
        ),
        (RACE, WRONG, HANGS),
        short=False,
    ),
    Mutant(
        "row sums: no barrier of the block",
        ((ROW_EXCHANGE, _SHARED, _SHARED.replace("      __syncthreads();\n", "")),),
        (RACE,),
    ),
    Mutant("row sums: one buffer", ((ROW_EXCHANGE, "kBuffers = 2", "kBuffers = 1"),), (RACE,)),
    Mutant(
        "row sums: the other blocks' values are not waited for",
        ((ROW_EXCHANGE, "      wait_barrier(shared_ + arrived(buffer), parity);\n", ""),),
        (RACE, "or of one that has ended"),
    ),
    Mutant(
        "row sums: no barrier of the cluster before the first",
        ((ROW_EXCHANGE, "    if (cluster_size_ != 1) wait_for_cluster();\n", ""),),
        (RACE,),
    ),
    Mutant(
        "quantised rows: scales are pushed before they are all staged",
        ((ROW_OWNERS, _STAGED + "    __syncthreads();\n", _STAGED),),
        (RACE,),
    ),
    Mutant(
        "local kernel: no barrier before the greatest magnitudes are read",
        (
            (
                ANY_ROWS,
                "      // Read below; written again only after the barriers in the next row's"
                " block_butterfly().\n      __syncthreads();\n",
                "",
            ),
        ),
        (RACE,),
        test="cuda_local_test",
        short=False,
    ),
    Mutant(
        "local kernel: sums of the next row are written over those that are read",
        (
            (
                ANY_ROWS,
                "width < 32 ? width : 32);\n  __syncthreads();\n",
                "width < 32 ? width : 32);\n",
            ),
        ),
        (RACE,),
        test="cuda_local_test",
        short=False,
    ),
)

# What is wrong on any memory: results differ, slots stay full, or a rank waits for ever.
WRONG_RESULTS = (
    Mutant(
        "two ranks, many rows: the next row is not sent after the one before",
        ((FUSED, _SEND_NOT_SENT, "      if (!sent && kWhenDue) send_next();\n"),),
        (HANGS,),
        build="plain",
    ),
    Mutant(
        "two ranks, many rows with a post norm: what was not due is not sent later",
        ((FUSED, _SEND_NOT_SENT, "      if (!sent && !kWhenDue) send_next();\n"),),
        (HANGS,),
        build="plain",
        short=False,
    ),
    Mutant(
        "two ranks, many rows with a post norm: what was sent when due is sent once more",
        ((FUSED, "        sent = true;\n", ""),),
        (HANGS, NOT_EMPTY, WRONG),
        build="plain",
        short=False,
    ),
    Mutant(
        "two ranks, many tokens of experts: the next token is not sent",
        ((FUSED, _PREFETCHED_SEND, "      } else {\n        pace.wait();\n"),),
        (HANGS,),
        build="plain",
        short=False,
    ),
    Mutant(
        "pace: turns do not add up",
        ((PACE, "    due_ns_ += turn_ns_;\n", ""),),
        (LATE,),
        build="plain",
        test="cuda_pace_test",
    ),
    Mutant(
        "pace: nobody waits for the start",
        ((PACE, "    wait_until_due();\n    due_ns_ += turns", "    due_ns_ += turns"),),
        (LATE,),
        build="plain",
        test="cuda_pace_test",
        short=False,
    ),
    Mutant(
        "local kernel of rows: a row takes the residual of the one before",
        ((LOCAL_ROWS, "    residual = next_residual;\n", ""),),
        (WRONG,),
        build="plain",
        test="cuda_local_test",
    ),
    Mutant(
        "one unit",
        edits.ONE_UNIT,
        (WRONG, HANGS, NOT_EMPTY),
        "plain",
    ),
    Mutant(
        "one word of a slot is tested",
        (
            (
                SLOT,
                "pack.word[0] != kEmptyWord && pack.word[1] != kEmptyWord &&"
                " pack.word[2] != kEmptyWord &&\n         pack.word[3] != kEmptyWord;",
                "pack.word[0] != kEmptyWord;",
            ),
        ),
        (WRONG,),
        "plain",
    ),
    Mutant(
        "partials are not canonicalised: one_shot",
        ((ONE_SHOT, "const Pack payload = canonicalize(own);", "const Pack payload = own;"),),
        (HANGS,),
        "plain",
    ),
    Mutant(
        "partials are not canonicalised: two_shot",
        ((TWO_SHOT, "                      canonicalize(own));", "                      own);"),),
        (HANGS,),
        "plain",
        short=False,
    ),
    Mutant(
        "finished rows are not canonicalised",
        ((ROW_OWNERS, "const Pack payload = canonicalize(y);", "const Pack payload = y;"),),
        (HANGS,),
        "plain",
        short=False,
    ),
    Mutant(
        "partials are not cleared: one_shot",
        edits.PARTIALS_STAY,
        (WRONG, NOT_EMPTY),
        "plain",
    ),
    Mutant(
        "few blocks: slots are not looked at anew for the next row",
        ((FUSED, "        peeked = transport_.peek(row + step_);\n", ""),),
        (WRONG, NOT_EMPTY, HANGS),
        "plain",
        short=False,
    ),
    Mutant(
        "few blocks: residuals of this turn's rows are loaded for the next turn",
        (
            (
                OWNED,
                "        load_residuals(index + step, index + step - lag);\n",
                "        load_residuals(index, index - lag);\n",
            ),
        ),
        (WRONG,),
        "plain",
        short=False,
    ),
    Mutant(
        "partials are not cleared: two_shot",
        ((TWO_SHOT, _CLEAR_TWO_SHOT, ""),),
        (WRONG, NOT_EMPTY),
        "plain",
        short=False,
    ),
    Mutant(
        "partials are not cleared: owned rows",
        ((ROW_OWNERS, _CLEAR_OWNED, ""),),
        (WRONG, NOT_EMPTY),
        "plain",
        short=False,
    ),
    Mutant(
        "sums and finished rows are not cleared",
        edits.RECEIVED_STAY,
        (WRONG, NOT_EMPTY),
        "plain",
        short=False,
    ),
    Mutant(
        "quantised elements are not cleared",
        edits.QUANTISED_STAY,
        (WRONG, NOT_EMPTY),
        "plain",
        short=False,
    ),
    Mutant(
        "scales are not cleared",
        edits.SCALES_STAY,
        (WRONG, NOT_EMPTY),
        "plain",
        short=False,
    ),
    Mutant(
        "a warp leaves a wait when the packs of one lane are there",
        ((EXCHANGE, "all_lanes(here)", "any_lane(here)"),),
        (WRONG,),
        "plain",
    ),
    Mutant(
        "lanes whose packs are there say who is missing",
        ((EXCHANGE, "if (!here) look(", "look("),),
        ("FAILED: fault",),
        "plain",
        "cuda_faults_test",
    ),
    Mutant(
        "the roll call does not wait",
        (
            (
                EXCHANGE,
                "    if (!wait_alone(announced, peer)) return;\n",
                "    if (!announced()) return;\n",
            ),
        ),
        ("FAILED: fault",),
        "plain",
        "cuda_faults_test",
    ),
    *(
        Mutant(
            f"after a failure {what}", edited, (WRONG_NUMBERS,), "plain", "cuda_faults_test", short
        )
        for what, edited, short in (
            ("sums are relayed", edits.RELAYED_AFTER_FAILURE, True),
            ("rows are published", edits.PUBLISHED_AFTER_FAILURE, True),
            ("quantised rows are published", edits.QUANTISED_AFTER_FAILURE, True),
            ("scales are published", edits.SCALES_AFTER_FAILURE, True),
            ("partials are sent: one_shot", edits.ONE_SHOT_AFTER_FAILURE, False),
            ("partials are sent: two_shot", edits.TWO_SHOT_AFTER_FAILURE, False),
            ("partials are sent: rows with owners", edits.OWNED_AFTER_FAILURE, False),
        )
    ),
    Mutant(
        "another order of summation",
        (
            (
                SLOTS,
                "  unpack<T>(partial[0], sum);",
                "  unpack<T>(partial[kCount - 1], sum);",
            ),
            (
                SLOTS,
                "add_pack<T>(sum, partial[rank]);",
                "add_pack<T>(sum, partial[kCount - 1 - rank]);",
            ),
        ),
        (WRONG,),
        "plain",
        "cuda_kernels_test",
        short=False,
    ),
    Mutant(
        "slots numbered as another rank numbers them",
        ((SLOTS, "rank + q >= world_size ? rank - 1 : rank;", "q - 1;"),),
        (WRONG, HANGS, NOT_EMPTY),
        "plain",
        short=False,
    ),
    Mutant(
        "a wide group's maximum from the wrong chunks",
        ((E4M3, "exchange_.chunk() & -chunks, chunks", "exchange_.chunk(), chunks"),),
        (WRONG,),
        "plain",
        "cuda_kernels_test",
        short=False,
    ),
    Mutant(
        "nvfp4: after a failure the scale is zero, and so are the elements",
        ((NVFP4, "static_cast<uint32_t>(kNanE4m3) << 16", "0"),),
        ("scales left after a timeout", WRONG_NUMBERS),
        "plain",
        "cuda_faults_test",
    ),
    Mutant(
        "nvfp4: elements beside a scale that is NaN",
        ((NVFP4, " & scale.kept)", ")"),),
        (WRONG,),
        "plain",
        "cuda_local_test",
        short=False,
    ),
    Mutant(
        "tiles: rows that do not exist are left as they are",
        ((TILES, "row + 32 * i < end) store", "row + 32 * i < end - 1) store"),),
        (WRONG,),
        "plain",
        "cuda_local_test",
        short=False,
    ),
    Mutant(
        "tiles: groups that do not exist are left as they are",
        ((TILES, "missing < 4 - group % 4", "missing < 3 - group % 4"),),
        (WRONG,),
        "plain",
        "cuda_local_test",
        short=False,
    ),
    Mutant(
        "experts: a choice that is no row is left out",
        ((EXPERTS, "sum[i] = no_row ?", "sum[i] = no_row && experts.top_k < 0 ?"),),
        (WRONG,),
        "plain",
        "cuda_local_test",
        short=False,
    ),
    Mutant(
        "experts: every token has the weights of the first",
        ((EXPERTS, "experts.weights + token * experts.weights_stride_bytes", "experts.weights"),),
        (WRONG,),
        "plain",
        "cuda_local_test",
        short=False,
    ),
    Mutant(
        "experts: a later launch takes the choices of the first",
        (
            (
                PREPARE,
                "4 * call.expert_index_stride, first_row)",
                "4 * call.expert_index_stride, 0)",
            ),
        ),
        (WRONG,),
        "plain",
        short=False,
    ),
    Mutant(
        "experts: the partial that is summed is that of the row before",
        ((FUSED, "advance() { now_ = next_; }", "advance() {}"),),
        (WRONG,),
        "plain",
        short=False,
    ),
    Mutant(
        "padding of scales is not zeroed",
        ((FUSED, "  Format::store_padding(", "  if (false) Format::store_padding("),),
        (WRONG,),
        "plain",
        short=False,
    ),
    Mutant(
        "operations that hand nothing back are not counted",
        edits.SINCE_NOT_COUNTED,
        (HANGS,),
        "plain",
        short=False,
    ),
    Mutant(
        "numbers compared with ==",
        edits.EQUAL_FOR_REACHED,
        (HANGS,),
        "plain",
        short=False,
    ),
    Mutant(
        "numbers compared without wrap-around",
        edits.COMPARED_WITHOUT_WRAPPING,
        (HANGS,),
        "plain",
        short=False,
    ),
    Mutant(
        "only the counters of the grid's own blocks are advanced",
        ((EXCHANGE, "copy < kMaxBlocks;", "copy < static_cast<int>(gridDim.x);"),),
        (WRONG, HANGS, "counter"),
        "plain",
        short=False,
    ),
    Mutant(
        "the counter is read before the preceding grid is complete",
        (
            *edits.PRECEDING_GRID_NOT_WAITED_FOR,
            (
                EXCHANGE,
                "    const uint64_t poisoned =",
                "    wait_for_preceding_grid();\n    const uint64_t poisoned =",
            ),
        ),
        (WRONG, HANGS, NOT_EMPTY, "counter"),
        "plain",
    ),
)

ISLANDS = tuple(
    Mutant(name, (edit,), report, "plain", "cuda_islands_test", short)
    for name, edit, report, short in (
        (
            "islands: sums are rounded before the exchange",
            (
                OWNED,
                "if (live_) islands_.store(here.local, unrounded);",
                "if (live_) { unpack<T>(sum, unrounded); islands_.store(here.local, unrounded); }",
            ),
            (WRONG,),
            True,
        ),
        (
            "islands: what is kept for the exchange is published too",
            (
                OWNED,
                "islands_.store(here.local, unrounded);\n        return;\n",
                "islands_.store(here.local, unrounded);\n        owners_.publish(slot, sum);\n"
                "        return;\n",
            ),
            (NOT_EMPTY, HANGS, WRONG),
            True,
        ),
        (
            "islands: sums are added from the last to the first",
            (
                ISLAND_SUMS,
                "first + island * params_",
                "first + (params_.num_islands - island) * params_",
            ),
            (WRONG,),
            False,
        ),
        (
            "islands: the last one is left out",
            (ISLAND_SUMS, "island < params_.num_islands;", "island < params_.num_islands - 1;"),
            (WRONG,),
            False,
        ),
        (
            "islands: behind the exchange partials are sent once more",
            (OWNED, "    if (takes_sums()) return;\n    const int owner", "    const int owner"),
            (NOT_EMPTY, HANGS),
            False,
        ),
        (
            "islands: rows are taken in turn, not in blocks",
            (OWNED, "      if (!takes_sums()) return {index", "      return {index"),
            (WRONG,),
            False,
        ),
    )
)

PROBES = tuple(
    Mutant(f"probe: {name}", (("gpu/probe.cuh", old, new),), (MISSING,), "plain", PROBE_TEST)
    for name, old, new in (
        ("the last peer gets no word", "peer >= params", "peer + 1 >= params"),
        (
            "the first peer gets no word",
            "peer == params.rank)",
            "peer == 0 || peer == params.rank)",
        ),
        ("the word of another rank", "probe_word(params.rank)", "probe_word(peer)"),
        ("in the place of another rank", "probe(params.rank)", "probe(peer)"),
    )
)

MUTANTS = RACES + WRONG_RESULTS + ISLANDS + PROBES
