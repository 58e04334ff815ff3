"""Commands in processes that are forked from one that has imported everything: a shell's `headscope` without the wait.

A server imports torch, transformers and headscope once. `client` is a script that hands it its arguments, folder,
environment and the three standard streams, and ends with the exit code of the process that was forked for them. It runs
`headscope`, or, where the first argument ends in `.py`, that script.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTS = (
    "torch",
    "transformers.modeling_utils",
    "matplotlib.figure",
    "headscope.cli.main",
    *(
        f"headscope.cli.{name}"
        for name in ("analyze", "compare", "convert", "heatmap", "importance", "prune", "report")
    ),
    *(f"headscope.cli.{name}" for name in ("analyze", "compare", "convert", "heatmap", "importance", "prune")),
    *(f"headscope.cli.{name}" for name in ("report", "size", "verify")),
    "headscope.heads.analysis",
    "headscope.pruning.command",
)

# Without `site` and what it imports, starting takes a tenth.
CLIENT = """\
import json, os, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(link, [len(asked).to_bytes(4, "big")], [0, 1, 2])
link.sendall(asked)
sys.exit(int(link.recv(4)))
"""


@contextmanager
def warm(folder: Path) -> Iterator[Path]:
    """Start the server; yields the client, an executable file in `folder`."""
    address = folder / "socket"
    client = folder / "headscope"
    (folder / "client.py").write_text(CLIENT.format(address=str(address)), encoding="utf-8")
    client.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{folder}/client.py" "$@"\n', encoding="utf-8")
    client.chmod(0o755)
    command = [sys.executable, "-m", "tests.warm", str(address)]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        yield client
    finally:
        server.kill()
        server.wait()


def serve(address: str) -> None:
    """Fork a process for each command that comes, for ever."""
    for module in IMPORTS:
        import_module(module)
    door = socket.socket(socket.AF_UNIX)
    door.bind(address)
    door.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        link, _ = door.accept()
        if os.fork():
            link.close()
        else:
            answer(link)


def answer(link: socket.socket) -> None:
    """Run one command, in a process of its own, and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, *_ = socket.recv_fds(link, 4, 3)
    asked = b""
    while len(asked) < int.from_bytes(size, "big"):
        asked += link.recv(1 << 16)
    argv, folder, environment = json.loads(asked)
    runner = os.fork()
    if runner:
        _, status = os.waitpid(runner, 0)
        link.sendall(str(os.waitstatus_to_exitcode(status) % 256).encode())
        os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # for the life of the process
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    code = run(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(argv: list[str]) -> int:
    """The command, or the script, as its own main program; its exit code."""
    try:
        if argv and argv[0].endswith(".py"):
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
        else:
            sys.argv = ["headscope", *argv]
            runpy.run_module("headscope", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
