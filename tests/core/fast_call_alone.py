"""Tests the library of repeated calls in an interpreter without torch; run by test_fast_call.py.

    python fast_call_alone.py LIBRARY SIZE_OF_CALL OP NUM_SLICES OFFSET...

OP, NUM_SLICES and OFFSET... are the offsets in a C call of op, num_slices, x, residual, weight,
out, residual_out, quantized, scale, post_weight, expert_index, expert_weights, shared, prefetch,
post and mix, then of each slice's x, weight and out. The program needs only the standard library,
so that any CPython can run it.
"""

import ctypes
import gc
import os
import sys
import threading

_CALLS = 20_000
_pointer, _object = ctypes.c_void_p, ctypes.py_object


# The library assumes that lower addresses are offsets into freed memory.
_BASE = 1 << 33


class Tensor:
    """A tensor as the library sees it.

    Args:
        offset: address relative to `_BASE`; the address itself if `storage` is given.
        storage: address of the tensor's storage, or "none".
    """

    alive = 0
    is_nested = property(lambda self: self.nested)

    def __init__(self, offset, storage=None):
        self.address = _BASE + offset if storage is None else offset
        self.storage, self.nested = storage, False
        Tensor.alive += 1

    def __del__(self):
        Tensor.alive -= 1

    def data_ptr(self):
        return self.address

    def untyped_storage(self):
        if self.storage == "none":
            raise RuntimeError("no storage")
        return Tensor(self.storage, self.storage)


def fail():
    """Ends the program, because the library used a tensor that it must not use."""
    os._exit(3)


class Parameter(Tensor):
    """The second class of tensors that the library recognizes."""


class Subclass(Tensor):
    """A tensor subclass that the library must not use."""

    is_nested = property(lambda self: fail())

    def data_ptr(self):
        fail()


class Launches:
    """A replacement of allnorm_run that records the addresses of the last call."""

    def __init__(self, offsets):
        self.offsets, self.status, self.seen, self.count = offsets, 0, (), 0
        self.function = ctypes.CFUNCTYPE(ctypes.c_int32, _pointer, _pointer)(self.run)

    def run(self, comm, call):
        assert comm == 77
        self.count += 1
        seen = tuple(_pointer.from_address(call + at).value for at in self.offsets)
        self.seen, self.seen_more, self.seen_slices = seen[:7], seen[7:14], seen[14:]
        return self.status


class Sum:
    """An argument that consists of tensors, like ExpertSum."""

    def __init__(self, rows, index, weights):
        self.rows, self.index, self.weights = rows, index, weights


class Post:
    """An argument that consists of a tensor and constants, like PostNorm."""

    def __init__(self, weight, eps=1e-5, bias=0.5):
        self.weight, self.eps, self.bias = weight, eps, bias


class Factors:
    """An argument that consists of two tensors, like HyperConnection."""

    def __init__(self, post, mix):
        self.post, self.mix = post, mix


class Slices:
    """An argument that consists of tuples of tensors, like core.slices.Slices."""

    places = ("tensors", "xs"), ("weights", "weights"), ("outs", "outs")

    def __init__(self, *given):
        vars(self).update(zip(dict(self.places), given, strict=True))


class Given:
    """An argument that may hold one of the call's tensors, like Fp8PerTensor."""

    def __init__(self, scale):
        self.scale = scale


MEMORY = ("out", "residual_out", "quantized_out", "scale_out")
SLOTS = (
    *("x", "x1", "x2", "x3", "residual", "weight", "weight1", "weight2", "weight3"),
    *("static_scale", "post_weight", "expert_index", "expert_weights", "shared", "post", "mix"),
    *("prefetch", "out", "out1", "out2", "out3", "residual_out", "quantized_out", "scale_out"),
)
SHARDED = 4  # the number of the operator that takes slices
CONSTANTS = {
    "op": "norm",
    "algorithm": "auto",
    "eps": 1e-6,
    "weight_bias": 0.0,
    "numerics": "rounded",
    "residual_sharded": False,
    "return_normed": False,
    "num_tokens": 0,
}
OTHERS = ("other", "one_shot", 1e-5, -0.0, "vllm", 0, True, False)
TABLE = (
    (
        "source",
        (),
        "x",
        ((Sum, (("rows", "x"), ("index", "expert_index"), ("weights", "shared"))),),
    ),
    *((name, (None,), name, ()) for name in ("residual", "weight")),
    *((name, (value,), None, ()) for name, value in CONSTANTS.items() if name != "op"),
    ("op", (), None, ()),
    ("post", (None,), None, ((Post, (("weight", "post_weight"), ("eps", None), ("bias", None))),)),
    ("quant", (None,), None, ((Given, (("scale", "static_scale"),)),)),
    *((name, (None,), name, ()) for name in MEMORY),
    ("left", (None,), "expert_weights", ()),
    ("ahead", (None,), "prefetch", ()),
    ("factors", (None,), None, ((Factors, (("post", "post"), ("mix", "mix"))),)),
    ("slices", (None,), None, ((Slices, Slices.places),)),
)


def missed(*arguments, **more):
    """Replaces Python's dispatch, to which C passes every call that it does not handle."""
    return "missed", arguments, more


def failed(status, **arguments):
    """Replaces the function that raises after a failed launch."""
    raise OSError(status, arguments)


def error_of(kind, call, arguments):
    """Returns the error that a call must raise."""
    try:
        call(**arguments)
    except kind as error:
        return error
    raise AssertionError(f"{arguments}: expected a {kind.__name__}")


class InterruptedByHandlerError(Exception):
    """The error that a signal handler raises."""


def interrupt(*arguments):
    """Simulates Python code during which a signal handler raises."""
    raise InterruptedByHandlerError


class Spec:
    """A constant compared by Python code, during which a signal handler raises."""

    def __eq__(self, other):
        interrupt()

    __hash__ = None


def raised_meanwhile(library, run, prepare, made_new, arguments):
    """Checks that a signal handler's error is raised only after Python has run the call."""
    calls = []

    def missed_call(**given):
        calls.append(given)
        return "missed"

    out, _ = made_new
    cases = (
        ("grad_enabled", {"results": made_new, "grad_enabled": interrupt}, {}),
        ("a comparison", {"results": made_new, "eps": Spec()}, {"eps": Spec()}),
        ("check", {"results": made_new, "check": interrupt}, {}),
        ("overwrite", {"results": made_new, "overwrite": interrupt}, {}),
        ("making a result", {"results": ((out[0], interrupt, ()),)}, {}),
        ("the device", {"results": made_new}, {"devices": (0, interrupt, None)}),
        ("the stream", {"results": made_new}, {"devices": (0, lambda: 0, interrupt)}),
    )
    for name, prepared, changes in cases:
        devices = changes.pop("devices", (None, None, None))
        call, keep, *_ = library.allnorm_fast_call_new(
            *(run, 77, missed_call, failed, None, None), *devices
        )
        keep(prepare(**prepared))
        given = arguments(**changes)
        for _ in range(3):
            calls.clear()
            error_of(InterruptedByHandlerError, call, given)
            assert calls == [given], name
    # An error of the call itself takes precedence.
    call, keep, *_ = library.allnorm_fast_call_new(
        *(run, 77, lambda **given: 1 // 0, failed, None, None, None, None, None)
    )
    keep(prepare(made_new, overwrite=interrupt))
    error_of(ZeroDivisionError, call, arguments())


def closed_meanwhile(library, run, prepared, arguments):
    """Closes the communicator while a call takes the lock."""
    lock, functions = threading.Lock(), []

    def acquire(blocking):
        assert not blocking
        functions[3]()
        return lock.acquire(blocking)

    functions += library.allnorm_fast_call_new(
        run, 77, missed, failed, acquire, lock.release, None, None, None
    )
    functions[1](prepared)
    assert functions[0](**arguments)[0] == "missed"
    assert not lock.locked()
    with lock:
        assert functions[0](**arguments)[0] == "missed", "only Python may wait for the lock"
    assert functions[4]() == 0


def new_streams(library, run, prepared, arguments):
    """Checks that Python dispatches the first call on each stream."""
    stream = [0]
    call, keep, *_ = library.allnorm_fast_call_new(
        *(run, 77, missed, failed, None, None), 0, lambda: 0, lambda device: stream[0]
    )
    keep(prepared)

    def is_made():
        return call(**arguments)[0] != "missed"

    assert is_made(), "the library knows the default stream"
    for stream[0] in (1 << 20, 1 << 21):
        assert not is_made()
        assert is_made()
    stream[0] = 1 << 20
    assert is_made(), "it remembers alternating streams"
    for stream[0] in range(1, 17):
        assert not is_made()
    stream[0] = 1 << 20
    assert not is_made(), "it forgets the oldest of many streams"


def slices(prepare, new, empty, launches):
    """Checks calls of two slices, whose tensors are in tuples."""
    xs, weights, outs = (tuple(map(Tensor, at)) for at in ((16, 32), (48, 64), (80, 96)))
    names, at = ("x", "x1", "weight", "weight1", "out", "out1"), SLOTS.index("out")

    def run(call, xs=xs, outs=None):
        return call(op="norm", source=Tensor(16), slices=Slices(xs, weights, outs))

    for kinds, memory, other in (
        ((0, 0), None, outs),
        ((1, 1), outs, (outs[0], Tensor(95))),
        ((2, 2), xs, outs),
        ((1, 2), (outs[0], xs[1]), outs),
    ):
        results = tuple((at + i, None if memory else empty, ((2, 8),)) for i in range(2))
        kinds = dict(zip(names, (1, 1, 1, 1, *kinds), strict=True)) | {"residual": 0}
        check = lambda *given, kinds=kinds: len(given) == [*kinds.values()].count(1)  # noqa: E731
        call, keep, *_ = new()
        keep(prepare(results, kinds, check=check, slices=Slices(xs, weights, memory)))
        got = run(call, outs=memory)
        assert type(got) is list
        assert memory is None or tuple(got) == memory
        order = (xs[0], weights[0], got[0], xs[1], weights[1], got[1])
        assert launches.seen_slices == (*(t.address for t in order), *6 * (None,))
        assert launches.seen[:4] == 4 * (None,), "these fields are not of slices"
        for wrong in (xs[0], xs[:1], (xs[0], None), (*xs, xs[0]), xs * 3, (xs[0], Subclass(16))):
            assert run(call, wrong, memory)[0] == "missed"
        assert run(call, list(xs), memory)[0] == run(call, xs, other)[0] == "missed"


def main(path, size, op, num_slices, *offsets):
    library = ctypes.PyDLL(path)
    library.allnorm_fast_call_new.argtypes = (_pointer, _pointer, *[_object] * 7)
    library.allnorm_fast_call_new.restype = _object
    library.allnorm_fast_call_prepare.argtypes = (_pointer, *[_object] * 5, _pointer)
    library.allnorm_fast_call_prepare.restype = _object
    library.allnorm_fast_call_use_keywords.argtypes = (_object,)
    library.allnorm_fast_call_use_keywords.restype = _object
    library.allnorm_fast_call_use_tensors.argtypes = (_object, _object, _object)
    library.allnorm_fast_call_use_tensors.restype = None
    forward_ad = {"_current_level": -1}
    launches = Launches(offsets)
    run = ctypes.cast(launches.function, _pointer).value
    addresses = iter(range(1 << 20, 1 << 40, 16))
    lock = threading.Lock()
    made = []

    def empty(*geometry):
        made.append(geometry)
        return Tensor(next(addresses))

    x, residual, weight = Tensor(16), Tensor(32), Tensor(48)
    geometry = ((2, 8), (8, 1), "bfloat16")
    native = ctypes.create_string_buffer(size)
    checked = []

    def check(*tensors):
        checked.append(len(tensors))
        return tensors[0] is x

    def new(locked=True):
        """Returns a new FastCall's functions."""
        acquire, release = (lock.acquire, lock.release) if locked else (None, None)
        return library.allnorm_fast_call_new(
            run, 77, missed, failed, acquire, release, None, None, None
        )

    nothing, tensor, same_as_input = range(3)
    out_at, residual_out_at, quantized_at, scale_at = map(SLOTS.index, MEMORY)
    static_at = SLOTS.index("static_scale")
    made_new = ((out_at, empty, geometry), (residual_out_at, empty, geometry))

    def prepare(results, kinds=None, pitch=0, **changes):
        enabled, overwrite = changes.pop("grad_enabled", None), changes.pop("overwrite", None)
        checks = changes.pop("check", check)
        kinds = {"x": tensor, "residual": tensor, "weight": tensor} | (kinds or {})
        operands = [(kinds.get(name, nothing), 4, 16, 4, pitch) for name in SLOTS]
        named = arguments(**changes)
        values = tuple(named.get(name, *default) for name, default, *_ in TABLE)
        return library.allnorm_fast_call_prepare(
            *(native, checks, enabled, overwrite, values, results),
            (ctypes.c_uint64 * 5 * len(SLOTS))(*operands),
        )

    def arguments(a=x, b=residual, c=weight, **more):
        """Returns the keyword arguments of a call, without those that have a default."""
        return {"op": "norm", "source": a, "residual": b, "weight": c, **more}

    def is_made(call, *given, **changes):
        got = call(**arguments(*given, **changes))
        return None if got[0] == "missed" else got

    for wrong in (((*TABLE[0][:2], "y", ()),), (TABLE[0][:3],), TABLE * 3, 3):
        try:
            library.allnorm_fast_call_use_keywords(wrong)
        except (ValueError, TypeError, SystemError):
            pass
        else:
            raise AssertionError(f"{wrong} must be refused")
    unknown, *_ = new()
    assert not is_made(unknown), "the library does not know the keywords yet"
    library.allnorm_fast_call_use_keywords(TABLE)
    prepared = prepare(made_new)
    call, keep, forget, close, _ = new()
    keep(prepared)
    keep(prepared)
    assert not is_made(call), "the library cannot tell yet whether forward AD is active"
    library.allnorm_fast_call_use_tensors(forward_ad, Tensor, Parameter)
    for forward_ad["_current_level"] in (0, "another"):
        assert not is_made(call)
    forward_ad.clear()
    assert not is_made(call)
    forward_ad["_current_level"] = -1
    first = call(**arguments())
    assert [type(t) for t in first] == [Tensor, Tensor]
    inputs = (_BASE + 16, _BASE + 32, _BASE + 48)
    nowhere = (None, None)  # quantized rows and scales
    assert launches.seen == (*inputs, first[0].address, first[1].address, *nowhere), launches.seen
    assert made == [geometry, geometry]
    assert checked == [3]
    for nested in (x, residual, weight):
        nested.nested = True
        assert not is_made(call), "strides of a nested tensor must not be read"
        nested.nested = False
    for other in (Subclass(64), object()):
        for place in range(3):
            given = [x, residual, weight]
            given[place] = other
            assert not is_made(call, *given)
    nowhere_at_all = Tensor(0, 0)  # as under torch.func transforms
    assert not is_made(call, x, residual, nowhere_at_all)
    assert checked == [3]
    assert is_made(call, x, residual, Parameter(48))
    assert checked == [3, 3]
    launches.status = 5
    assert error_of(OSError, call, arguments()).args == (5, arguments())
    launches.status = 0
    assert call(**arguments(residual, x)) == ("missed", (), arguments(residual, x))
    assert not is_made(call, x, None)
    assert not is_made(call, out=Tensor(64))
    for name, other in zip(CONSTANTS, OTHERS, strict=True):
        assert not is_made(call, **{name: other}), other
        assert is_made(call, **{name: CONSTANTS[name]}), "an explicit default is no difference"
    backwards = dict(reversed(arguments(algorithm="".join(["au", "to"])).items()))
    assert call(**backwards)[0] != "missed"
    renamed = {"".join(["sou", "rce"]): x, **{k: v for k, v in backwards.items() if k != "source"}}
    assert call(**renamed)[0] != "missed"
    assert not is_made(call, unheard_of=None)
    for wrong in ({}, {"source": x}, {"op": "norm"}):
        assert call(**wrong) == ("missed", (), wrong)
    assert call(x, residual) == ("missed", (x, residual), {})
    assert call(x, **arguments()) == ("missed", (x,), arguments())
    checked.clear()
    made.clear()

    # Results in preallocated memory are the caller's tensors, which must not overlap others.
    into, keep_into, *_ = new()
    keep_into(prepare(((out_at, None, ()), made_new[1]), {"out": tensor}))
    both_given = (out_at, None, ()), (residual_out_at, None, ())
    # Rows of 4 bytes that are 10 bytes apart may alternate with other tensors' rows.
    beside, keep_beside, *_ = new()
    keep_beside(prepare(((out_at, None, ()), made_new[1]), {"out": tensor}, pitch=10))
    for address in (8, 12, 20, 32, 52, 56, 60, 64):
        got = is_made(beside, out=Tensor(address))
        assert (got is not None) == (address in (12, 52, 64)), address
    in_place = {"out": same_as_input, "residual_out": tensor}
    keep_into(prepare(both_given, in_place))
    made.clear()
    for address, expected in ((64, True), (63, False), (49, False), (40, False), (1, False)):
        out = Tensor(address)
        got = is_made(into, out=out)
        assert (got is not None) == expected, address
        assert got is None or (got[0] is out and launches.seen[3] == _BASE + address)
    assert made == [geometry]
    other = Tensor(80)
    assert into(**arguments(out=x, residual_out=other)) == (x, other)
    assert launches.seen == (*inputs, _BASE + 16, _BASE + 80, *nowhere)
    for taken in (Tensor(20), Tensor(16), Tensor(47), residual, x):
        assert not is_made(into, out=x, residual_out=taken)
    assert not is_made(into, out=other, residual_out=x)
    assert not is_made(into)

    # Quantizing calls: with a given scale or memory for scales, and without normed rows.
    quantizing, keep_quantizing, *_ = new()
    unwanted = (out_at, None, ())
    results = ((quantized_at, empty, geometry), (static_at, None, ()), made_new[1], unwanted)
    static = Tensor(96)
    keep_quantizing(prepare(results, {"static_scale": tensor}, quant=Given(Tensor(112))))
    got = is_made(quantizing, quant=Given(static))
    assert got[1] is static
    assert got[3] is None
    assert launches.seen == (*inputs, None, got[2].address, got[0].address, _BASE + 96)
    results = ((quantized_at, None, ()), (scale_at, None, ()), made_new[1], made_new[0])
    keep_quantizing(prepare(results, {"quantized_out": tensor, "scale_out": tensor}))
    memory = {"quantized_out": Tensor(128), "scale_out": Tensor(160)}
    got = is_made(quantizing, **memory)
    assert got[:2] == (memory["quantized_out"], memory["scale_out"])
    assert launches.seen[3:] == (got[3].address, got[2].address, _BASE + 128, _BASE + 160)
    for taken in (Tensor(120), Tensor(140), residual, Tensor(162)):
        assert not is_made(quantizing, **{**memory, "scale_out": taken})
    # Arguments with parts, each one of the call's tensors or a constant.
    extended, keep_extended, *_ = new()
    parts = tuple(map(Tensor, (200, 216, 232, 248, 328, 360, 376)))

    def with_parts(post, index, left, shared, ahead, *factors):
        given = {"a": Sum(x, index, shared), "post": Post(post), "left": left, "ahead": ahead}
        return {**given, "factors": Factors(*factors)}

    kinds = dict.fromkeys(SLOTS[static_at + 1 : out_at], tensor)
    keep_extended(prepare(made_new, kinds, **with_parts(*parts)))
    parts = tuple(map(Tensor, (264, 280, 296, 312, 344, 392, 408)))
    assert is_made(extended, **with_parts(*parts))
    assert launches.seen_more == tuple(t.address for t in parts)
    assert checked[-1] == 10
    assert not is_made(extended)
    assert not is_made(extended, **with_parts(*parts[:3], None, *parts[4:]))
    assert not is_made(extended, **with_parts(*parts[:4], None, *parts[5:]))
    assert not is_made(extended, **with_parts(*parts[:6], None))
    for other in (Post(parts[0], 1e-6), Post(parts[0], 1e-5, -0.5), parts[0], None, Given(x)):
        assert not is_made(extended, **{**with_parts(*parts), "post": other})
    for other in (Post(parts[0]), Sum(x, "index", parts[3]), Sum(None, *parts[:2]), x):
        assert not is_made(extended, **{**with_parts(*parts), "a": other})
    incomplete = Post(parts[0])
    del incomplete.bias
    assert not is_made(extended, **{**with_parts(*parts), "post": incomplete})
    del extended, keep_extended, parts, incomplete
    # A single result is returned directly, not in a tuple.
    single, keep_single, *_ = new()
    keep_single(prepare(made_new[:1]))
    assert type(single(**arguments())) is Tensor
    count = launches.count

    def failing(*geometry):
        raise MemoryError("none left")

    broken, keep_broken, *_ = new()
    keep_broken(prepare(((out_at, failing, geometry), made_new[1])))
    assert not is_made(broken), "Python repeats the failing step and tells the peers"
    for storage, expected in ((0, False), (16, True), ("none", False)):
        low = Tensor(256, storage)
        got = is_made(call, x, low)
        assert (got is not None) == expected, "a low address may be an offset into freed memory"
    count += 1
    assert not is_made(call, x, Tensor(0, 0))
    assert not is_made(call, x, Tensor(2)), "the address is not aligned to elements"
    gradients = []
    graded, keep_graded, *_ = new()
    keep_graded(prepare(made_new, grad_enabled=lambda: gradients[0]))
    for gradients[:] in ([True], [False], [1]):
        assert (is_made(graded) is not None) == (gradients == [False])
    count += 1
    # The version counters of preallocated results are incremented before the launch.
    versions = []
    counted, keep_counted, *_ = new()
    see = lambda tensors: versions.append((tensors, launches.count))  # noqa: E731
    keep_counted(prepare(both_given, in_place, overwrite=see))
    other = Tensor(80)
    assert counted(**arguments(out=x, residual_out=other)) == (x, other)
    assert versions == [((x, other), count)]
    count += 1
    versions.clear()
    keep_counted(prepare(made_new, overwrite=failing))
    assert not is_made(counted), "Python repeats the failing step"
    assert not lock.locked()
    wrong_places = ((len(SLOTS), empty, geometry), (2, empty, geometry), ("0", empty, geometry))
    for wrong in (*wrong_places, (out_at, empty), (out_at,), 3):
        try:
            prepare((wrong,))
        except (ValueError, TypeError, IndexError, SystemError):
            pass
        else:
            raise AssertionError(f"{wrong} must be refused")

    native[op], native[num_slices] = SHARDED, 2
    slices(prepare, new, empty, launches)
    native[op] = 0
    count = launches.count
    raised_meanwhile(library, run, prepare, made_new, arguments)
    closed_meanwhile(library, run, prepared, arguments())
    assert launches.count == count, "a closed communicator must not launch"
    new_streams(library, run, prepared, arguments())
    del first, out, got, other, taken, into, keep_into, low, graded, keep_graded, static, memory
    del counted, keep_counted
    del quantizing, keep_quantizing, single, keep_single
    good, bad = arguments(), arguments(weight)

    def repeat(call):
        for _ in range(_CALLS):
            call(**good)
            call(**bad)
            made.clear()
            checked.clear()

    repeat(call)  # on the first pass the interpreter allocates some objects
    gc.collect()
    alive, count = Tensor.alive, launches.count
    # Since Python 3.12 the last three are immortal, so their counts must not change.
    tensors = (x, residual, weight)
    watched = (*tensors, *CONSTANTS.values(), geometry, prepared, missed, None, True, False)
    before = [sys.getrefcount(thing) for thing in watched]
    repeat(call)
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(abs(a - b) < 100 for a, b in zip(after, before, strict=True)), (before, after)
    assert launches.count == count + _CALLS
    assert Tensor.alive == alive, (Tensor.alive, alive)
    forget()
    assert not is_made(call)
    keep(prepared)
    assert is_made(call)
    close()
    keep(prepared)
    assert not is_made(call)
    # A prepared call is freed with its last owner.
    del prepared, broken, keep_broken, call, keep, forget, close
    gc.collect()
    assert sys.getrefcount(geometry) < before[watched.index(geometry)]
    assert Tensor.alive == alive
    print("ok", sys.version.split()[0])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
