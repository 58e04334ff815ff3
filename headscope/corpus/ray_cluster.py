"""A connection to a Ray cluster, one that runs or one of our own, silent on standard output."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headscope.errors import InputError, ResourceError

# No report on usage goes out, and no advice on settings is printed.
_OURS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# One attempt of 40 seconds, where Ray makes twenty.
_JOINING = {"RAY_gcs_server_port_wait_time_s": "1"}
# Partitions and parts pass through it, a few at a time.
_STORE_BYTES = 256 << 20
_SECONDS_TO_REACH = 10.0
_HOST = re.compile(r"(?:ray://)?(?P<host>[^\s/]+):(?P<port>\d+)")


@contextmanager
def connected(workers: int, address: str | None) -> Iterator[tuple[Any, bool]]:
    """Within the block Ray is there; afterwards what was started is shut down, and what was connected disconnected.

    Args:
        workers: CPUs of a cluster of our own.
        address: Of a cluster that runs; None starts one, unless this process uses Ray already.

    Yields:
        Ray, and whether the cluster is our own.

    Raises:
        InputError: There is no cluster at the address.
        ResourceError: None starts here.
    """
    with _environment(_OURS if address is None else _OURS | _JOINING):
        import ray

        if ray.is_initialized():
            yield ray, False
            return
        if address is not None:
            _check_somebody_listens(address)
        with _sigterm_kept(ray), _nothing_printed(ray):
            yield from _with_cluster(ray, workers, address)


def _with_cluster(ray: Any, workers: int, address: str | None) -> Iterator[tuple[Any, bool]]:
    try:
        _start(ray, workers) if address is None else _join(ray, address)
        yield ray, address is None
    finally:
        ray.shutdown()


def _start(ray: Any, workers: int) -> None:
    try:
        ray.init("local", num_cpus=workers, include_dashboard=False, object_store_memory=_STORE_BYTES, **_silent())
    except Exception as error:  # Ray raises anything from ValueError to its own errors
        raise ResourceError(f"no Ray cluster starts here: {_first_line(error)}", "take --runner local") from error


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address, **_silent())
    except Exception as error:  # of the connection, of versions that differ, of names that are none
        raise _unreachable(address, _first_line(error)) from error


def _silent() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": logging.ERROR}


def _check_somebody_listens(address: str) -> None:
    """Ray itself would try for a long time, and may end the process then."""
    place = _HOST.fullmatch(address)
    if place is None:
        return
    try:
        socket.create_connection((place["host"].strip("[]"), int(place["port"])), _SECONDS_TO_REACH).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, str(error)) from error


def _unreachable(address: str, why: str) -> InputError:
    return InputError(
        f"the Ray cluster at {address} cannot be reached: {why}",
        "give the address that `ray start --head` printed (with RAY_AUTH_MODE=token where it asks for one), or none "
        "to start a cluster on this machine",
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# ------------------------------------------------------------------ silence
@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Settings that the user has not made, for the time of the block; those that Ray makes go with them."""
    before = {name for name in os.environ if name.startswith("RAY_")}
    for name, value in values.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            if name not in before:
                del os.environ[name]


@contextmanager
def _nothing_printed(ray: Any) -> Iterator[None]:
    """Ray prints to standard output that a worker died, whatever is set; this switch is the one its debugger uses."""
    module = ray._private.worker
    before = getattr(module, "_worker_logs_enabled", True)
    module._worker_logs_enabled = False
    try:
        yield
    finally:
        module._worker_logs_enabled = before


@contextmanager
def _sigterm_kept(ray: Any) -> Iterator[None]:
    """Ray would put a handler of its own in the place of whatever is there."""
    utils = ray._private.utils
    before = getattr(utils, "set_sigterm_handler", None)
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before
