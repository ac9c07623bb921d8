"""A bounded cache of what was read, and of what is read in the background before it is needed."""

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

READ_AT_ONCE = 8  # of what is needed now
AHEAD_AT_ONCE = 4  # in the background
END_SECONDS = 5.0  # how long the end of a job waits for reads in the background, which nobody needs any more

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")
Load: TypeAlias = Callable[[Any], tuple[Any, int]]  # what a key stands for, and its size in bytes


class Cache:
    """What was read last, up to a number of bytes but at least `least` of it; a copy for another process is empty.

    What is read ahead takes the place of what was read long ago, and never makes the cache larger than that. Several
    threads may use the cache. Those that read ahead live only while there is something to read.
    """

    def __init__(self, most_bytes: int, least: int = 1) -> None:
        self.least = least
        self.most_bytes = most_bytes
        self.forget()
        _caches.add(self)

    def forget(self) -> None:
        """Begin with nothing, as a forked process must: it has no copy of the threads, which may hold the lock."""
        self._changed = threading.Condition()
        self._held: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._ahead: dict[Any, tuple[Any, int]] = {}  # read in the background, and not needed yet
        self._coming: dict[Any, Load] = {}  # to be read in the background, in this order
        self._reading: set[Any] = set()  # being read in the background
        self._bytes = 0
        self._largest = 0
        self._num_threads = 0
        self._seconds = 0.0

    def get(self, key: Key, load: Callable[[Key], tuple[Any, int]]) -> Any:
        """What `load` gives for the key, from memory if it is there."""
        return self.get_all([key], load)[0]

    def get_all(self, keys: Sequence[Key], load: Callable[[Key], tuple[Any, int]]) -> list[Any]:
        """What `load` gives for each key, from memory if it is there; the others are loaded several at a time."""
        found, missing = self._look_up(keys)
        found |= zip(missing, _in_threads(load, missing), strict=True)
        for key in keys:
            if key not in found:
                found[key] = self._wait_for(key) or load(key)
        with self._changed:
            for key in keys:
                self._hold(key, found[key])
            self._read_on()
        return [found[key][0] for key in keys]

    def read_ahead(self, keys: Iterable[Key], load: Callable[[Key], tuple[Any, int]]) -> None:
        """Have these loaded in the background, in this order, as far as there is room for them.

        If loading one raises, it is loaded again when it is needed.
        """
        with self._changed:
            for key in keys:
                if key not in self._held and key not in self._ahead and key not in self._reading:
                    self._coming.setdefault(key, load)
            self._read_on()

    def stop_reading_ahead(self) -> None:
        """Forget what is not needed yet, and wait for the threads to end."""
        with self._changed:
            self._bytes -= sum(size for _, size in self._ahead.values())
            for one in (self._ahead, self._coming, self._reading):
                one.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_threads, END_SECONDS)

    def take_seconds(self) -> float:
        """How long reading in the background took since the last call, but for what was waited for."""
        with self._changed:
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _look_up(self, keys: Sequence[Key]) -> tuple[dict[Key, Any], list[Key]]:
        """What there is of the keys, and those that the caller is to load: nobody does so yet."""
        with self._changed:
            for key in keys:
                self._coming.pop(key, None)
            found = {key: one for key in keys if (one := self._held.get(key) or self._ahead.get(key)) is not None}
            return found, [key for key in keys if key not in found and key not in self._reading]

    def _wait_for(self, key: Hashable) -> tuple[Any, int] | None:
        """What is being read in the background; None if that has failed."""
        with self._changed:
            began = time.perf_counter()
            self._changed.wait_for(lambda: key not in self._reading)
            self._seconds -= time.perf_counter() - began
            return self._ahead.get(key)

    def _hold(self, key: Hashable, value: tuple[Any, int]) -> None:
        """Hold it as the newest."""
        for one in (self._held, self._ahead):
            self._bytes -= one.pop(key, (None, 0))[1]
        self._held[key] = value
        self._count(value[1])

    def _count(self, size: int) -> None:
        """Count what is new, which takes the place of the oldest."""
        self._bytes += size
        self._largest = max(self._largest, size)
        while self._bytes > self.most_bytes and len(self._held) > self.least:
            self._bytes -= self._held.popitem(last=False)[1][1]

    def _read_on(self) -> None:
        """Start threads for what is to be read in the background."""
        while self._num_threads < AHEAD_AT_ONCE and (begun := self._begin()) is not None:
            self._num_threads += 1
            threading.Thread(target=self._read_coming, args=begun, name="reading-ahead", daemon=True).start()

    def _begin(self) -> tuple[Any, Load] | None:
        """Begin to read the next one; None if there is none, or no room for it."""
        if not self._coming or not self._has_room():
            return None
        key = next(iter(self._coming))
        self._reading.add(key)
        return key, self._coming.pop(key)

    def _has_room(self) -> bool:
        """Whether one more fits beside what is read ahead and those that must be held, if all are as the largest.

        Without a largest one, no size is known yet.
        """
        ahead = sum(size for _, size in self._ahead.values())
        needed = ahead + (self.least + len(self._reading) + 1) * self._largest
        return self._largest > 0 and needed <= self.most_bytes

    def _read_coming(self, key: Any, load: Load) -> None:
        """What a thread runs."""
        begun: tuple[Any, Load] | None = key, load
        while begun is not None:
            key, load = begun
            began, read = time.perf_counter(), None
            with suppress(Exception):  # whoever needs it loads it, and has the error
                read = load(key)
            begun = self._end(key, read, time.perf_counter() - began)

    def _end(self, key: Any, read: tuple[Any, int] | None, seconds: float) -> tuple[Any, Load] | None:
        """Keep what was read, unless nobody needs it any more; begin to read the next one."""
        with self._changed:
            self._seconds += seconds
            if key in self._reading:
                self._reading.remove(key)
                if read is not None:
                    self._ahead[key] = read
                    self._count(read[1])
            begun = self._begin()
            self._num_threads -= begun is None
            self._changed.notify_all()
            return begun

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.most_bytes, self.least)


_caches: "weakref.WeakSet[Cache]" = weakref.WeakSet()


def _forget_all() -> None:
    for cache in list(_caches):
        cache.forget()


os.register_at_fork(after_in_child=_forget_all)


def _in_threads(load: Callable[[Key], T], keys: Sequence[Key]) -> list[T]:
    if len(keys) < 2:
        return [load(key) for key in keys]
    with ThreadPoolExecutor(min(READ_AT_ONCE, len(keys))) as pool:
        return list(pool.map(load, keys))
