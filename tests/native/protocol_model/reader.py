"""Reads the CUDA protocol out of `csrc`, so that a model of it cannot be of something else.

The order and scope of every access are those of the PTX in `gpu/cuda/memory.cuh`; which accesses
there are, and in what order, is what stands in the functions of the exchange and of the transports.
A line that this reader does not know is an error: whoever changes the protocol says here what the
change means, and the checks then say whether it is right.
"""

from __future__ import annotations

import dataclasses
import re

from .exchange import COMPARISONS, Exchange, Step, Transport, equal_bits
from .program import Access
from .source import MEMORY, SourceError, Sources, block, verbs
from .turns import Turns

EXCHANGE, FUSED, PREPARE = "gpu/exchange.cuh", "gpu/fused.cuh", "gpu/prepare.h"
ONE_SHOT, TWO_SHOT = "gpu/transports/one_shot.cuh", "gpu/transports/two_shot.cuh"
OWNED, ROW_OWNERS = "gpu/owned_rows.cuh", "gpu/transports/row_owners.cuh"
NVFP4 = "gpu/formats/nvfp4.cuh"
SLOTS, PACKED = "gpu/slots.cuh", "gpu/words.cuh"
LAYOUT, NUMERICS = "protocol/layout.h", "protocol/numerics.h"
CALL_TAG, SIGNAL, SLOT = "protocol/call_tag.h", "protocol/signal.h", "protocol/slot.h"

_CALLS = {
    *("store_to_peer", "load_from_peer", "store_words", "receive_partials", "receive_pack"),
    *("clear_partials", "clear_slot", "wait_for_preceding_grid", "receive_and_store_scale"),
    *("wait_alone", "wait_together", "wait_for_number"),
}
_WAIT_FOR_NUMBER = "wait_for_number"
# Both of wait_alone and wait_together: what a lane waits for is what its own loads return, whether
# the lanes of its warp leave the loop together or not.
_WAIT = "wait"
# Functions over quantised packs, 8 bytes for a dtype of 16 bits; for float32 the same with u32.
_OF_QUANTIZED = {"store_to_peer": SLOTS, "load_from_peer": SLOTS, "store_words": PACKED}


# Exchanges of which all is used again soon, for models of few operations: of halves of two units,
# that is, of two operations; and of four, so that some wait for a number and hand nothing back.
SMALL_HALVES = (LAYOUT, "kHalfUnits = 16", "kHalfUnits = 2")
HALVES_OF_FOUR = (LAYOUT, "kHalfUnits = 16", "kHalfUnits = 4")


def read_exchange(sources: Sources | None = None) -> Exchange:
    """The protocol of this tree's sources, or of a variant of them."""
    source = sources or Sources()
    # The tags of a new workspace are those of the operations before the first.
    source.one(PREPARE, r"op = first_op - back;")
    # Its operation counter starts with nothing kept, see Turns.
    source.one(PREPARE, r"fill_n\(counters, kMaxBlocks, first_op\);")
    released = source.one(PREPARE, r"fill_n\(released, kPushMaxWorldSize, first_op( [-+] \d+)?")
    reader = _Reader(source)
    return Exchange(
        turns=reader.turns(),
        waits_for_grid=reader.waits_for_grid(),
        roll_call=reader.roll_call(),
        hand_back=reader.hand_back(),
        transports=reader.transports(),
        tested_words=reader.tested_words(),
        head=reader.head(),
        first_released=_offset(released[1]),
        nan_words=reader.nan_words(),
    )


def _offset(text: str | None) -> int:
    return int(text.replace(" ", "")) if text else 0


def _of_bits(steps: tuple[Step, ...], finished: str = "e4m3") -> tuple[Step, ...]:
    """The steps of a quantised row: its second hop is not of the bits of x."""
    bits = {"finished": finished, "scale": "scale"}
    return tuple(dataclasses.replace(step, bits=bits.get(step.where, "")) for step in steps)


class _Reader:
    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._verbs = verbs(sources)

    def _calls(self, body: str) -> list[tuple[str, str]]:
        """(Function, arguments) of memory verbs and waits, in program order.

        What a lambda does stands where it is waited for: it becomes the wait's arguments.
        """
        lambdas: list[tuple[int, str, str]] = []
        while match := re.search(r"const auto (\w+) = \[&\] \{", body):
            inside = block(body, match.end() - 1)
            lambdas.append((match.start(), match[1], inside))
            body = body[: match.start()] + body[match.end() + len(inside) + 1 :]
        calls = []
        for match in re.finditer(r"\b(\w+)(?:<[\w, ]*>)?\(", body):
            if match[1] in _CALLS or any(match[1] == name for name, _ in self._verbs):
                arguments = block(body, match.end() - 1, "()")
                called = match[1]
                if called.startswith("wait_") and "," in arguments:
                    called = _WAIT
                    name = arguments.split(",")[0]
                    before = [i for at, n, i in lambdas if n == name and at <= match.start()]
                    arguments = before[-1]
                calls.append((called, " ".join(arguments.split())))
        return calls

    def _access(self, name: str, width: str = "") -> Access:
        if (name, width) not in self._verbs:
            raise SourceError(f"{MEMORY} has no {name} of {width or 'nothing'}")
        return self._verbs[name, width]

    def _load(self, text: str, width: str) -> Access:
        """How all the loads in `text` access, which must be alike."""
        names = set(re.findall(r"\bload_\w+", text))
        if names == {"load_from_peer"}:
            return self._quantized("load_from_peer")
        if len(names) != 1:
            raise SourceError(f"loads {sorted(names)}, expected one kind: {text}")
        return self._access(names.pop(), width)

    def _quantized(self, name: str) -> Access:
        bodies = self._sources.overloads(_OF_QUANTIZED[name], name)
        calls = {call for body in bodies for call, _ in self._calls(body)}
        (verb,) = (call for call in calls if (call, "u64") in self._verbs)
        return self._access(verb, "u64")

    # ---- the exchange ----------------------------------------------------------------------------

    def waits_for_grid(self) -> bool:
        body = self._sources.function(EXCHANGE, "Exchange", after="explicit Exchange")
        calls = [name for name, _ in self._calls(body)]
        return calls == ["wait_for_preceding_grid"]

    def turns(self) -> Turns:
        """PushTurn, in Python; an operation's number is what the exchange makes of it."""
        said = {
            EXCHANGE: (
                "turn_ = {static_cast<uint32_t>(counter >> 32), params_.units, params_.large};",
                "phases.at(params_.large ? turn_.large_phase() : turn_.unit());",
                "slots_begin_ = params_.phases.at(",
                "return params_.workspace[q] + slots_begin_;",
                "return static_cast<uint64_t>(turn_.next()) << 32 | (op_ + 1);",
            ),
            PREPARE: ("params.units = params.large ? 1 : units;",),
            LAYOUT: ("static_cast<int64_t>(op % kTagSlots) * kPushMaxWorldSize + source",),
        }
        for path, texts in said.items():
            source = " ".join(self._sources[path].split())
            for text in texts:
                if source.count(text) != 1:
                    raise SourceError(f"{path} says {text} {source.count(text)} times")
        return Turns(self._sources[LAYOUT])

    def head(self) -> tuple[Step, ...]:
        """What a large operation begins with: lanes of each block wait, then the block does."""
        body = self._sources.function(EXCHANGE, "begin")
        if "if (params_.large) wait_for_slots();" not in body:
            return ()
        for path, function, rows in (
            (FUSED, "run_fused", "stream.run_"),
            (OWNED, "run_owned_rows", "rows.run(first,"),
        ):
            before = ("Exchange<kWorldSize> exchange(", ".begin();", "work_on_no_row<")
            self._check_order(path, function, *before, rows)
        body = self._sources.function(EXCHANGE, "wait_for_slots")
        calls = self._calls(body)
        if calls != [(_WAIT_FOR_NUMBER, "peer_of_lane()")]:
            raise SourceError(f"wait_for_slots: {calls}")
        wait = self._released()
        if body.rstrip().endswith("__syncthreads();"):
            return (wait, Step("barrier", Access()))
        return (wait,)

    def roll_call(self) -> tuple[Step, ...]:
        steps: list[Step] = []
        tag = re.compile(r"theirs( \+ 8)?, params_\.tag\.word\(op_, ([01])\)")
        for name, arguments in self._calls(self._sources.function(EXCHANGE, "call_roll")):
            if match := tag.fullmatch(arguments):
                steps.append(Step("store", self._access(name, "u64"), f"tag{match[2]}"))
            elif name == _WAIT:
                steps.extend(self._announced(arguments))
            else:
                raise SourceError(f"call_roll: {name}({arguments})")
        return tuple(steps)

    def _announced(self, text: str) -> list[Step]:
        """Each word carries low bits of the number of its operation, all of which must be equal."""
        access = self._load(text, "u64")
        if "return CallTag::is_of(op_, seen[0], seen[1]);" in text:
            text = self._sources.function(CALL_TAG, "is_of")
        tests = dict(re.findall(r"(?:word|seen\[)([01])\]? >> (\d+) == \(?op", text))
        return [
            Step("wait", access, f"tag{word}", compare=equal_bits(64 - int(tests.get(word, 64))))
            for word in "01"
        ]

    def hand_back(self) -> tuple[Step, ...]:
        body = self._sources.function(EXCHANGE, "hand_back_slots")
        steps: list[Step] = []
        asked = re.search(r"if \(turn_\.hands_back\(\)\) \{", body)
        if asked is not None:
            inside = block(body, asked.end() - 1)
            steps += self._hand_back(body[: asked.start()])
            found = self._hand_back(inside)
            steps += [dataclasses.replace(step, if_hands_back=True) for step in found]
            body = body[asked.end() + len(inside) :]
        return tuple(steps + self._hand_back(body))

    def _hand_back(self, body: str) -> list[Step]:
        steps: list[Step] = []
        number = re.compile(r"PushControl::released\(params_\.rank\), op_( [-+] \d+)?$")
        for name, arguments in self._calls(body):
            if name.startswith("fence"):
                steps.append(Step("fence", self._access(name)))
            elif match := number.search(arguments):
                access = self._access(name, "u32")
                steps.append(Step("store", access, "released", _offset(match[1])))
            elif name == _WAIT_FOR_NUMBER:
                steps.append(self._released())
            else:
                raise SourceError(f"hand_back_slots: {name}({arguments})")
        return steps

    def _released(self) -> Step:
        calls = self._calls(self._sources.function(EXCHANGE, _WAIT_FOR_NUMBER))
        if [name for name, _ in calls] != [_WAIT]:
            raise SourceError(f"{_WAIT_FOR_NUMBER}: {calls}")
        ((_, text),) = calls
        number = r"op_( [-+] \d+)?( - turn_\.since\(\))?"
        if match := re.fullmatch(rf"return has_reached\(\w+\(\w+\), {number}\);", text):
            body = self._sources.function(SIGNAL, "has_reached")
            comparison = " ".join(body.split()).removeprefix("return ").removesuffix(";")
        elif match := re.fullmatch(rf"return \w+\(\w+\) == {number};", text):
            comparison = "seen == expected"
        else:
            raise SourceError(f"a wait for {text}")
        if comparison not in COMPARISONS:
            raise SourceError(f"a comparison {comparison}")
        return Step(
            "wait",
            self._load(text, "u32"),
            "released",
            _offset(match[1]),
            COMPARISONS[comparison],
            since=match[2] is not None,
        )

    # ---- the transports --------------------------------------------------------------------------

    def nan_words(self) -> dict[str, int]:
        canonical = int(self._sources.one(SLOT, r"kCanonicalWord = 0x([0-9a-f]+)u;")[1], 16)
        nan_e4m3 = int(self._sources.one(NUMERICS, r"kNanE4m3 = 0x([0-9a-f]+);")[1], 16)
        # The greatest magnitude of a row of 16 bits as a float32: half of it is a zero.
        words = {"e4m3": nan_e4m3 * 0x01010101, "scale": 0x7FFF0000}
        self._sources.one(NVFP4, r"kNanWord = static_cast<uint32_t>\(kNanE4m3\) << 16;")
        self._sources.one(NVFP4, r"& scale\.kept\) \| scale\.e4m3 << 16;")
        words["nvfp4"] = nan_e4m3 << 16
        return {"16": canonical, "32": canonical, **words}

    def _guards(self, path: str, name: str, after: str) -> list[str]:
        """Of each store to peers in a function: `Step.unless`."""
        body = self._sources.function(path, name, after)
        found = []
        for store in re.finditer(r"\b(?:store_relaxed_sys|store_to_peer)\(", body):
            before = body[: store.start()]
            asked = re.findall(r"if \([^;{]*?exchange_\.(failed\w*)\(\)\) return", before)
            if "const bool silent = exchange_.failed_before();" in before:
                inside = [
                    m.start()
                    for m in re.finditer(r"!silent\) \{", before)
                    if m.end() + len(block(body, m.end() - 1)) > store.start()
                ]
                if inside or "if (silent) return;" in before:
                    asked.append("failed_before")
            found.append(asked[-1] if asked else "")
        return found

    def tested_words(self) -> frozenset[int]:
        body = self._sources.function(SLOT, "arrived")
        return frozenset(int(w) for w in re.findall(r"pack\.word\[(\d)\] != kEmptyWord", body))

    def _steps(self, path: str, name: str, where: str, after: str = "") -> tuple[Step, ...]:
        """What a function does with slots; those that it stores or waits for are of `where`."""
        steps: list[Step] = []
        guards = iter(self._guards(path, name, after))
        for call, arguments in self._calls(self._sources.function(path, name, after)):
            clears = "kEmptyWord" in arguments
            if call == "receive_partials":
                steps.extend(self._partials())
            elif call == "clear_partials":
                calls = self._calls(self._sources.function(SLOTS, call))
                if [name for name, _ in calls] != ["clear_slot"]:
                    raise SourceError(f"clear_partials: {calls}")
                steps.append(self._cleared("partial"))
            elif call == "receive_pack":
                steps.extend(self._steps(SLOTS, call, where))
            elif call == "receive_and_store_scale":
                steps.extend(self._steps(path, call, where))
            elif call == _WAIT:
                of_scale = "scale" in arguments
                access = self._arrival(arguments, "u32" if of_scale else "v4.u32")
                steps.append(Step("wait", access, "scale" if of_scale else where))
            elif call == "clear_slot":
                steps.append(self._cleared(where))
            elif clears and call == "store_u32":
                steps.append(Step("clear", self._access(call, "u32"), "scale"))
            elif clears and call == "store_words":
                steps.append(Step("clear", self._quantized(call), where))
            elif call == "store_to_peer":
                steps.append(Step("store", self._quantized(call), where, unless=next(guards)))
            elif call == "store_relaxed_sys":
                of_scale = arguments.endswith(", scale")
                access = self._access(call, "u32" if of_scale else "v4.u32")
                at = "scale" if of_scale else where
                steps.append(Step("store", access, at, unless=next(guards)))
            else:
                raise SourceError(f"{path}, {name}: {call}({arguments})")
        return tuple(steps)

    def _arrival(self, text: str, width: str) -> Access:
        if not re.search(r"return arrived\(\w+\);|return scale != kEmptyWord;", text):
            raise SourceError(f"a wait for {text}")
        return self._load(text, width)

    def _partials(self) -> list[Step]:
        # The same for every number of ranks: receive_partials() only chooses it.
        chooses = self._sources.function(SLOTS, "receive_partials")
        if self._calls(chooses) or chooses.count("receive_partials_of<T, kCount>(") != 1:
            raise SourceError(f"receive_partials: {chooses}")
        ((name, text),) = self._calls(self._sources.function(SLOTS, "receive_partials_of"))
        tests_all = "all = all && (source == place || arrived(partial[source]));" in text
        if name != _WAIT or not tests_all:
            raise SourceError(f"receive_partials_of: {name} {text}")
        access = self._load(text.replace("all &&", ""), "v4.u32")
        # The first poll may have been made before: after the wait for the preceding grid.
        for call, _ in self._calls(self._sources.function(ONE_SHOT, "peek")):
            if self._access(call, "v4.u32") != access:
                raise SourceError(f"peek: {call}")
        return [Step("wait", access, "partial")]

    def _cleared(self, where: str) -> Step:
        ((name, arguments),) = self._calls(self._sources.function(SLOTS, "clear_slot"))
        if "slot, {kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord}" not in arguments:
            raise SourceError(f"clear_slot: {name}({arguments})")
        return Step("clear", self._access(name, "v4.u32"), where)

    def transports(self) -> dict[str, Transport]:
        for schedule in ("run_one_shot", "run_paced", "run_prefetched"):
            self._check_order(FUSED, schedule, "send(first_,", "transport_.receive(")
        order = ("send(first_,", "transport_.relay(", "transport_.receive(")
        self._check_order(FUSED, "run_two_shot", *order)
        order = ("send(first_,", "_.peek(first_)", "transport_.receive(", "_.peek(row + step_")
        self._check_order(FUSED, "run_few_blocks", *order)
        self._check_order(OWNED, "run", "send(first,", "do_own_part(index", "receive(back)")
        part = ("owners_.receive_partials(", "owners_.publish(")
        self._check_order(OWNED, "do_own_part", *part)
        send = self._steps(ROW_OWNERS, "send_partial", "partial")
        partials = self._steps(ROW_OWNERS, "receive_partials", "partial", after="send_partial")
        to_rows = self._steps(ROW_OWNERS, "publish", "finished")

        def without_scales(steps: tuple[Step, ...]) -> tuple[Step, ...]:
            return tuple(step for step in steps if step.where != "scale")

        to_quantized = self._steps(ROW_OWNERS, "publish", "finished", after="Pack receive(")
        return {
            "one_shot": Transport(
                all_sum=True,
                send=self._steps(ONE_SHOT, "send", "partial"),
                own=self._steps(ONE_SHOT, "receive", "partial", after="class OneShot"),
            ),
            "two_shot": Transport(
                all_sum=False,
                send=self._steps(TWO_SHOT, "send", "partial"),
                own=self._steps(TWO_SHOT, "relay", "finished"),
                receive=self._steps(TWO_SHOT, "receive", "finished", after="Pack relay"),
            ),
            "owned_rows": Transport(
                all_sum=False,
                send=send,
                own=(*partials, *to_rows),
                receive=self._steps(ROW_OWNERS, "receive", "finished", after="void publish"),
            ),
            "owned_quantized": Transport(
                all_sum=False,
                send=send,
                own=_of_bits((*partials, *to_quantized)),
                receive=_of_bits(self._steps(ROW_OWNERS, "receive_and_store", "finished")),
            ),
            "owned_nvfp4": Transport(  # words have their scale in them
                all_sum=False,
                send=send,
                own=_of_bits((*partials, *without_scales(to_quantized)), "nvfp4"),
                receive=_of_bits(
                    without_scales(self._steps(ROW_OWNERS, "receive_and_store", "finished")),
                    "nvfp4",
                ),
            ),
            "gather": Transport(
                all_sum=False,
                send=(),
                own=to_rows,
                receive=self._steps(ROW_OWNERS, "receive", "finished", after="void publish"),
            ),
        }

    def _check_order(self, path: str, name: str, *texts: str) -> None:
        body = self._sources.function(path, name)
        places = [body.find(text) for text in texts]
        if -1 in places or places != sorted(places):
            raise SourceError(f"{path}, {name}: expected {', then '.join(texts)}")
