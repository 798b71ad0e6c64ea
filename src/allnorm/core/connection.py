"""The connection for unfused calls: the communicator's process group, created when needed."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time

import torch

from allnorm.core.between import LOOK_SECONDS, GroupExchange, own_store
from allnorm.core.channel import WORDS, Channel, Waits
from allnorm.core.rendezvous import Rendezvous
from allnorm.errors import AllnormError, UnsupportedError


class NotConnectedError(AllnormError):
    """The ranks could not connect; every rank raises this error."""


class Connection:
    """A communicator's process group for unfused calls, created by the first such call."""

    def __init__(
        self,
        meeting: Rendezvous,
        device: torch.device,
        backend: str,
        timeout: datetime.timedelta,
    ) -> None:
        self._rank, self._world_size = meeting.rank, meeting.world_size
        self._store, self._prefix = meeting.store, meeting.prefix("unfused")
        self._device, self._backend, self._timeout = device, backend, timeout
        self._attempts = 0
        self._exchange: GroupExchange | None = None

    @property
    def failure(self) -> str:
        """Why the exchange was aborted; empty if it was not."""
        return "" if self._exchange is None else self._exchange.failure

    @property
    def connected(self) -> GroupExchange:
        """The exchange, for a captured call.

        Raises:
            UnsupportedError: the ranks are not connected yet, and cannot connect in a capture.
        """
        if self._exchange is None:
            raise UnsupportedError(
                "this call runs unfused, but the ranks are not connected for such calls yet, and "
                "cannot connect while a CUDA graph is captured. Make one unfused call (any shape) "
                "with this communicator before the capture, on every rank."
            )
        return self._exchange

    def connect(self, channel: Channel, waits: Waits) -> GroupExchange:
        """Connects the ranks, unless they are connected, and returns the exchange. Collective.

        Raises:
            NotConnectedError: a rank failed to connect; every rank raises; the ranks stay in step.
            RuntimeError: the wait for the other ranks failed.
        """
        if self._exchange is not None:
            return self._exchange
        self._attempts += 1
        made: list[GroupExchange] = []
        errors: list[str] = []
        key = f"{self._prefix}/{self._attempts}/failed"

        def make() -> None:
            try:
                made.append(self._make())
            except Exception as error:  # noqa: BLE001 - published to every rank, and raised below
                errors.append(self._tell(key, error))

        # In a thread, because neither backend ends its wait if a peer exits or fails to connect.
        thread = threading.Thread(target=make, name="allnorm-connect", daemon=True)
        thread.start()
        waits.notes.enter(range(self._world_size))
        start = time.monotonic()
        try:
            while thread.is_alive() and not errors:
                thread.join(LOOK_SECONDS)
                if thread.is_alive():
                    waits.look_at_peers(time.monotonic() - start)
                    self._read_failure(key, errors)
        except BaseException as error:
            self._tell(key, error)  # so that the peers do not wait for this rank
            raise
        waits.notes.leave()
        succeeded = channel.gather([int(not errors), *(0,) * (WORDS - 1)], waits)
        if all(words[0] for words in succeeded):
            (self._exchange,) = made
            self._exchange.notes = waits.notes
            return self._exchange
        for exchange in made:
            exchange.abort("another rank has failed")
        self._read_failure(key, errors)
        raise NotConnectedError(
            "the ranks could not connect for calls that run unfused: "
            f"{errors[0] if errors else 'a rank failed'}. Nothing was computed. Find out what "
            f"keeps that rank from using {self._backend}, and call again on every rank."
        )

    def _make(self) -> GroupExchange:
        store = own_store(self._store, f"{self._prefix}/{self._attempts}", self._timeout)
        place = store, self._rank, self._world_size, self._device, self._backend, self._timeout
        if self._device.type == "cpu":
            return GroupExchange(*place, "the exchange of unfused calls")
        torch.cuda.set_device(self._device)  # this thread's device
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            return GroupExchange(*place, "the exchange of unfused calls")

    def _tell(self, key: str, error: BaseException) -> str:
        """Publishes why this rank does not connect, and returns the message."""
        text = f"rank {self._rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self._store.set(key, text[:1000])
        return text

    def _read_failure(self, key: str, errors: list[str]) -> None:
        """Appends the failure that another rank has published, unless `errors` has one."""
        if not errors and self._store.check([key]):
            errors.append(self._store.get(key).decode(errors="replace"))

    def abort(self, why: str) -> None:
        """Aborts the exchange, so that waiting peers get an error. Any thread."""
        if self._exchange is not None:
            self._exchange.abort(why)

    def close(self) -> None:
        """Releases the exchange. Idempotent."""
        if self._exchange is not None:
            self._exchange.close()
