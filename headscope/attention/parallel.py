"""Small operations on all of a processor's cores: many at a time, each on one core, instead of each cut over all cores.

An operation on a tile takes about as long as it takes to hand its pieces to other cores and to wait for the slowest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from threading import Barrier, Lock
from typing import TypeVar

import torch

_Item = TypeVar("_Item")

# More threads than this wait for the interpreter, not for the cores.
_MOST = 16

_lock = Lock()
_pools: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):
    # A forked process has none of its parent's threads.
    os.register_at_fork(after_in_child=_pools.clear)


def in_parallel(work: Callable[[Iterable[_Item]], None], items: Sequence[_Item], device: torch.device) -> None:
    """Have `work` done on all items, by as many threads as torch uses; each takes the next item when it is free.

    Args:
        work: Takes items until there are none. What it does for one must not depend on the others.
        items: In the order in which they are begun.
        device: Where the work is done; anything but a processor works on many things at a time by itself.

    Raises:
        Whatever `work` raises.
    """
    threads = min(torch.get_num_threads(), len(items), _MOST)
    if threads < 2 or device.type != "cpu":
        work(items)
        return
    # The next item of a list's iterator is taken by one thread only.
    shared = iter(list(items))
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def share() -> None:
        # Threads have modes of their own, and tensors made in one cannot be changed in another.
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            work(shared)

    pool = _pool(torch.get_num_threads())
    done, _ = wait([pool.submit(share) for _ in range(threads)])
    for part in done:
        part.result()


def _pool(threads: int) -> ThreadPoolExecutor:
    with _lock:
        if threads not in _pools:
            size = min(threads, _MOST)
            pool = ThreadPoolExecutor(size, thread_name_prefix="headscope")
            together = Barrier(size)
            for ready in [pool.submit(partial(_alone, together)) for _ in range(size)]:
                ready.result()
            # A thread's setting is also what new threads start with.
            torch.set_num_threads(threads)
            _pools[threads] = pool
        return _pools[threads]


def _alone(together: Barrier) -> None:
    """Let operations of this thread use one core; waits, so that every thread of the pool gets its turn."""
    # A thread takes the common setting when it first asks, which must not be after it has got its own.
    torch.get_num_threads()
    torch.set_num_threads(1)
    together.wait()
