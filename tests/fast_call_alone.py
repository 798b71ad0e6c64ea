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


class Tensor:
    """What the library sees of one."""

    alive = 0

    def __init__(self, address):
        self.address = address
        Tensor.alive += 1

    def __del__(self):
        Tensor.alive -= 1

    def data_ptr(self):
        return self.address


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
    """Another thread closes while a call waits for the lock."""
    lock, functions = threading.Lock(), []

    def acquire():
        lock.acquire()
        functions[3]()

    functions += library.allnorm_fast_call_new(
        run, 77, empty, acquire, lock.release, None, None, None
    )
    functions[1](prepared)
    assert functions[0](*arguments) is None
    assert not lock.locked()


def main(path, size, *offsets):
    library = ctypes.PyDLL(path)
    library.allnorm_fast_call_new.argtypes = (_pointer, _pointer, *[_object] * 6)
    library.allnorm_fast_call_new.restype = _object
    library.allnorm_fast_call_prepare.argtypes = (_pointer, ctypes.c_int32, *[_object] * 4)
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

    make, keep, forget, close = library.allnorm_fast_call_new(
        run, 77, empty, lock.acquire, lock.release, None, None, None
    )
    results = ((0, geometry), (1, geometry))
    prepared = library.allnorm_fast_call_prepare(call, 1, check, norm, algorithm, results)
    keep(prepared)
    keep(prepared)
    first = make(x, residual, weight, norm, algorithm)
    assert [type(t) for t in first] == [Tensor, Tensor]
    assert launches.seen == (16, 32, 48, first[0].address, first[1].address), launches.seen
    assert made == [geometry, geometry]
    assert checked == [3]
    launches.status = 5
    assert make(x, residual, weight, norm, algorithm) == 5
    launches.status = 0
    assert make(residual, x, weight, norm, algorithm) is None
    assert make(x, None, weight, norm, algorithm) is None
    assert make(x, residual, weight, None, algorithm) is None
    assert make(x, residual, weight, (*norm[:3], 0), algorithm) is None

    def failing(*geometry):
        raise MemoryError("none left")

    broken, keep_broken, *_ = library.allnorm_fast_call_new(
        run, 77, failing, lock.acquire, lock.release, None, None, None
    )
    keep_broken(prepared)
    try:
        broken(x, residual, weight, norm, algorithm)
    except MemoryError:
        pass
    else:
        raise AssertionError("an error of the allocator must be raised")
    assert not lock.locked()
    for wrong in ((4, geometry), (-1, geometry), ("0", geometry), (0,), 3):
        try:
            library.allnorm_fast_call_prepare(call, 1, check, norm, algorithm, (wrong,))
        except (ValueError, TypeError, IndexError, SystemError):
            pass
        else:
            raise AssertionError(f"{wrong} must be refused")

    closed_meanwhile(library, run, empty, prepared, (x, residual, weight, norm, algorithm))
    assert launches.count == 2, "nothing is launched for who was closed meanwhile"
    del first

    def repeat(call):
        for _ in range(_CALLS):
            call(x, residual, weight, norm, algorithm)
            call(weight, residual, weight, norm, algorithm)
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
    assert make(x, residual, weight, norm, algorithm) is None
    keep(prepared)
    assert make(x, residual, weight, norm, algorithm) is not None
    close()
    keep(prepared)
    assert make(x, residual, weight, norm, algorithm) is None
    # What was prepared goes with the last who holds it.
    del prepared, broken, keep_broken, make, keep, forget, close
    gc.collect()
    assert sys.getrefcount(geometry) < before[watched.index(geometry)]
    assert Tensor.alive == alive
    print("ok", sys.version.split()[0])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
