"""The library of repeated calls under an interpreter without torch: a program of test_fast_call.py.

    python fast_call_alone.py LIBRARY SIZE_OF_CALL OFFSET...

Offsets are those of x, residual, weight, out and residual_out in a call. Standard library only, so
that any CPython can run it.
"""

import ctypes
import gc
import sys
import threading

_CALLS = 20_000
_pointer, _object = ctypes.c_void_p, ctypes.py_object


# Lower an address may be an offset into memory that is not there.
_BASE = 1 << 33


class Tensor:
    """What the library sees of one; with `storage`, its own address and that of its memory."""

    alive = 0

    def __init__(self, offset, storage=None):
        self.address = _BASE + offset if storage is None else offset
        self.storage = storage
        Tensor.alive += 1

    def __del__(self):
        Tensor.alive -= 1

    def data_ptr(self):
        return self.address

    def untyped_storage(self):
        return Tensor(self.storage, self.storage)


class Launches:
    """Stands for allnorm_run; remembers the addresses of the last call."""

    def __init__(self, offsets):
        self.offsets, self.status, self.seen, self.count = offsets, 0, (), 0
        self.function = ctypes.CFUNCTYPE(ctypes.c_int32, _pointer, _pointer)(self.run)

    def run(self, comm, call):
        assert comm == 77
        self.count += 1
        self.seen = tuple(_pointer.from_address(call + at).value for at in self.offsets)
        return self.status


def closed_meanwhile(library, run, empty, prepared, arguments):
    """Another thread closes while a call takes the lock, or has it."""
    lock, functions = threading.Lock(), []

    def acquire(blocking):
        assert not blocking
        functions[3]()
        return lock.acquire(blocking)

    functions += library.allnorm_fast_call_new(
        run, 77, empty, acquire, lock.release, None, None, None
    )
    functions[1](prepared)
    assert functions[0](*arguments) is None
    assert not lock.locked()
    with lock:
        assert functions[0](*arguments) is None, "Python waits, not this"
    assert functions[4]() == 0


def new_streams(library, run, empty, prepared, arguments):
    """The first call on a stream is Python's, which tells the library about the stream."""
    stream = [0]
    make, keep, *_ = library.allnorm_fast_call_new(
        *(run, 77, empty, None, None), 0, lambda: 0, lambda device: stream[0]
    )
    keep(prepared)
    assert make(*arguments) is not None, "the default stream is known"
    for stream[0] in (1 << 20, 1 << 21):
        assert make(*arguments) is None
        assert make(*arguments) is not None
    stream[0] = 1 << 20
    assert make(*arguments) is not None, "it alternates"
    for stream[0] in range(1, 17):
        assert make(*arguments) is None
    stream[0] = 1 << 20
    assert make(*arguments) is None, "of many streams the first are forgotten"


def main(path, size, *offsets):
    library = ctypes.PyDLL(path)
    library.allnorm_fast_call_new.argtypes = (_pointer, _pointer, *[_object] * 6)
    library.allnorm_fast_call_new.restype = _object
    library.allnorm_fast_call_prepare.argtypes = (_pointer, *[_object] * 5, _pointer, _pointer)
    library.allnorm_fast_call_prepare.restype = _object
    launches = Launches(offsets)
    run = ctypes.cast(launches.function, _pointer).value
    addresses = iter(range(1 << 20, 1 << 40, 16))
    lock = threading.Lock()
    made = []

    def empty(*geometry):
        made.append(geometry)
        return Tensor(next(addresses))

    x, residual, weight = Tensor(16), Tensor(32), Tensor(48)
    geometry, norm, algorithm = ((2, 8), (8, 1), "bfloat16"), (1e-6, 0.0, "rounded", False), "auto"
    call = ctypes.create_string_buffer(size)
    checked = []

    def check(*tensors):
        checked.append(len(tensors))
        return tensors[0] is x

    make, keep, forget, close, _ = library.allnorm_fast_call_new(
        run, 77, empty, lock.acquire, lock.release, None, None, None
    )
    results = ((0, geometry), (1, geometry))
    nothing, tensor, same_as_input = range(3)

    def prepare(results, out=nothing, residual_out=nothing, grad_enabled=None):
        given = (ctypes.c_uint8 * 5)(tensor, tensor, tensor, out, residual_out)
        spans = (ctypes.c_uint64 * 5)(*[16] * 5)
        return library.allnorm_fast_call_prepare(
            *(call, check, grad_enabled, norm, algorithm, results, given, spans)
        )

    prepared = prepare(results)
    keep(prepared)
    keep(prepared)
    first = make(x, residual, weight, norm, algorithm, None, None)
    assert [type(t) for t in first] == [Tensor, Tensor]
    addresses_of_inputs = (_BASE + 16, _BASE + 32, _BASE + 48)
    results_of_first = (first[0].address, first[1].address)
    assert launches.seen == addresses_of_inputs + results_of_first, launches.seen
    assert made == [geometry, geometry]
    assert checked == [3]
    launches.status = 5
    assert make(x, residual, weight, norm, algorithm, None, None) == 5
    launches.status = 0
    assert make(residual, x, weight, norm, algorithm, None, None) is None
    assert make(x, None, weight, norm, algorithm, None, None) is None
    assert make(x, residual, weight, None, algorithm, None, None) is None
    assert make(x, residual, weight, (*norm[:3], 0), algorithm, None, None) is None

    # Memory that is given: returned as it is, and nothing of it may be what else is given.
    into, keep_into, *_ = library.allnorm_fast_call_new(
        run, 77, empty, lock.acquire, lock.release, None, None, None
    )
    keep_into(prepare(((0, None), (1, geometry)), out=tensor))
    keep_into(prepare(((0, None), (1, None)), out=same_as_input, residual_out=tensor))
    made.clear()
    for address, is_made in ((64, True), (63, False), (49, False), (40, False), (1, False)):
        out = Tensor(address)
        got = into(x, residual, weight, norm, algorithm, out, None)
        assert (got is not None) == is_made, address
        assert got is None or (got[0] is out and launches.seen[3] == _BASE + address)
    assert made == [geometry]
    other = Tensor(80)
    assert into(x, residual, weight, norm, algorithm, x, other) == (x, other)
    assert launches.seen == (*addresses_of_inputs, _BASE + 16, _BASE + 80)
    for taken in (Tensor(20), Tensor(16), Tensor(47), residual, x):
        assert into(x, residual, weight, norm, algorithm, x, taken) is None
    assert into(x, residual, weight, norm, algorithm, other, x) is None
    assert into(x, residual, weight, norm, algorithm, None, None) is None
    count = launches.count

    def failing(*geometry):
        raise MemoryError("none left")

    broken, keep_broken, *_ = library.allnorm_fast_call_new(
        run, 77, failing, lock.acquire, lock.release, None, None, None
    )
    keep_broken(prepared)
    # Python meets it again, and lets the peers know.
    assert broken(x, residual, weight, norm, algorithm, None, None) is None
    for storage, is_made in ((0, False), (16, True), ("none", False)):
        low = Tensor(256, storage)
        got = make(x, low, weight, norm, algorithm, None, None)
        assert (got is not None) == is_made, "an offset into memory that is not there"
    count += 1
    assert make(x, Tensor(0, 0), weight, norm, algorithm, None, None) is None
    assert make(x, Tensor(2), weight, norm, algorithm, None, None) is None, "between elements"
    gradients = []
    graded, keep_graded, *_ = library.allnorm_fast_call_new(
        run, 77, empty, lock.acquire, lock.release, None, None, None
    )
    keep_graded(prepare(results, grad_enabled=lambda: gradients[0]))
    for gradients[:] in ([True], [False], [1], []):
        got = graded(x, residual, weight, norm, algorithm, None, None)
        assert (got is not None) == (gradients == [False])
    count += 1
    assert not lock.locked()
    for wrong in ((4, geometry), (-1, geometry), ("0", geometry), (0,), 3):
        try:
            prepare((wrong,))
        except (ValueError, TypeError, IndexError, SystemError):
            pass
        else:
            raise AssertionError(f"{wrong} must be refused")

    arguments = (x, residual, weight, norm, algorithm, None, None)
    closed_meanwhile(library, run, empty, prepared, arguments)
    assert launches.count == count, "nothing is launched for who was closed meanwhile"
    new_streams(library, run, empty, prepared, arguments)
    del first, out, got, other, taken, into, keep_into, low, graded, keep_graded

    def repeat(call):
        for _ in range(_CALLS):
            call(x, residual, weight, norm, algorithm, None, None)
            call(weight, residual, weight, norm, algorithm, None, None)
            made.clear()
            checked.clear()

    repeat(make)  # what the interpreter does once is done
    gc.collect()
    alive, count = Tensor.alive, launches.count
    # The last are immortal from 3.12 on: whoever counts them wears them out.
    watched = (x, residual, weight, norm, *norm, algorithm, geometry, prepared, None, True, False)
    before = [sys.getrefcount(thing) for thing in watched]
    repeat(make)
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(abs(a - b) < 100 for a, b in zip(after, before, strict=True)), (before, after)
    assert launches.count == count + _CALLS
    assert Tensor.alive == alive, (Tensor.alive, alive)
    forget()
    assert make(x, residual, weight, norm, algorithm, None, None) is None
    keep(prepared)
    assert make(x, residual, weight, norm, algorithm, None, None) is not None
    close()
    keep(prepared)
    assert make(x, residual, weight, norm, algorithm, None, None) is None
    # What was prepared goes with the last who holds it.
    del prepared, broken, keep_broken, make, keep, forget, close
    gc.collect()
    assert sys.getrefcount(geometry) < before[watched.index(geometry)]
    assert Tensor.alive == alive
    print("ok", sys.version.split()[0])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
