"""Runs a function on several ranks, as torchrun would start them, without loading PyTorch anew for each.

A server process imports PyTorch and the trainer once and forks a process a rank: run_on_ranks(4, function, argument).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["bitcheck.reference_runs.train", "tests.reference_runs.processes"])
TIMEOUT_S = 100.0
PORTS = "TEST_PORTS"
"""The variable that holds the ports at which further process groups of a rank can meet."""
MAX_GROUPS = 4
"""Process groups that a rank may begin, one after the other."""


def run_on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on every rank at once and return what each gave, in rank order.

    `function` is a module's own, and what it takes and gives can be pickled. Raises AssertionError with the
    first rank's error where one failed.
    """
    ports = find_free_ports(MAX_GROUPS)
    ends, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        variables = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[0]}
        variables[PORTS] = ",".join(map(str, ports[1:]))
        process = _CONTEXT.Process(target=_call, args=(theirs, variables, function, arguments), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        answers = []
        for rank, end in enumerate(ends):
            assert end.poll(TIMEOUT_S), f"rank {rank} does not answer"
            answers.append(_receive(end, rank))
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    for rank, (_, error) in enumerate(answers):
        assert error is None, f"rank {rank}: {error}"
    return [value for value, _ in answers]


def find_free_ports(count: int) -> list[int]:
    """Return numbers of ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def meet_elsewhere() -> None:
    """In a rank: let the next process group meet at another port.

    A rank that is early would meet at the store of the group before, which another rank still serves, and find
    the addresses there at which nobody listens any more.
    """
    first, _, rest = os.environ[PORTS].partition(",")
    os.environ["MASTER_PORT"], os.environ[PORTS] = first, rest


def _receive(end: Connection, rank: int) -> tuple[Any, str | None]:
    try:
        answer: tuple[Any, str | None] = end.recv()
    except EOFError:
        return None, f"rank {rank} ended without an answer"
    return answer


def _call(end: Connection, variables: dict[str, Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    try:
        end.send((function(*arguments), None))
    except BaseException as error:  # noqa: BLE001 - the test reads it
        end.send((None, f"{type(error).__name__}: {error}"))
