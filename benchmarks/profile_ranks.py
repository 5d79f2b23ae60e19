"""Where the time of a recorded step goes on several ranks: CPU time of each thread, and what they are at.

    torchrun --nproc-per-node 2 -m benchmarks.profile_ranks --kinds ddp fsdp

The training is that of `gpu_ranks.py`. For the bare step and for each level: milliseconds a step on the clock,
milliseconds a step that each thread of rank 0 spent on a CPU (`/proc/self/task`), and in how many of some hundred
looks each thread was at which line of the recorder, or of what the recorder or the program called. Looking takes
the interpreter's lock, so the clock's times here are no measurement of cost.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from benchmarks.gpu import RecordedJob, timed
from benchmarks.gpu_ranks import KINDS, LEVELS, Bench, connect

TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
LOOK_S = 0.002
MOST_LINES = 14


def thread_times() -> Counter[str]:
    """Return the CPU time of this process's threads by name, ms."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        which = "main" if task.name == str(os.getpid()) else name
        found[which] += TICK_MS * (int(fields[11]) + int(fields[12]))  # type: ignore[assignment]
    return found


class Looks:
    """Looks at what all threads are at, until it is closed."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self.count = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        main, own = threading.main_thread().ident, threading.get_ident()
        named = {thread.ident: thread.name for thread in threading.enumerate()}
        while not self._is_over.wait(LOOK_S):
            self.count += 1
            for ident, frame in sys._current_frames().items():
                if ident != own:
                    name = "main" if ident == main else named.get(ident, "backward")
                    self.seen[name, _place(frame)] += 1


def _place(frame: FrameType) -> str:
    """Return the recorder's innermost line, and what it called; of the program, its innermost line."""
    innermost = _line(frame)
    at: FrameType | None = frame
    while at is not None:
        if "/hooks/" in at.f_code.co_filename or "/bitcheck/" in at.f_code.co_filename:
            own = _line(at)
            return own if own == innermost else f"{own} > {innermost}"
        at = at.f_back
    return f"(program) {innermost}"


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def profile(bench: Bench, kind: str, steps: int) -> None:
    """Print where the time of one kind of training goes, bare and recorded."""
    job = bench.job(kind)
    folder = bench.scratch / f"{kind}-profile"
    folder.mkdir(exist_ok=True)
    recorded = {level: RecordedJob(job, level, folder, bench.rank, bench.world_size) for level in LEVELS}

    def bare(steps: int) -> None:
        for _ in range(steps):
            job.step()

    blocks: dict[str, Callable[[int], None]] = {"bare": bare}
    for level in LEVELS:
        blocks[str(level)] = functools.partial(recorded[level].block, micro_batches=1)
    for block in blocks.values():
        block(2)
    for name, block in blocks.items():
        plain = _clock(block, steps)
        usual = sys.getswitchinterval()
        sys.setswitchinterval(usual / 10)
        quick = _clock(block, steps)
        sys.setswitchinterval(usual)
        before = thread_times()
        looks = Looks()
        watched = _clock(block, steps)
        looks.close()
        spent = {thread: ms / steps for thread, ms in (thread_times() - before).items()}
        bench.say(
            f"\n## {kind}, {name}: {plain:.1f} ms a step; {quick:.1f} where threads take turns ten times as often; "
            f"{watched:.1f} under {looks.count} looks\n",
            "CPU ms a step: " + ", ".join(f"{thread} {ms:.1f}" for thread, ms in sorted(spent.items()) if ms >= 0.5),
        )
        threads = Counter(thread for thread, _ in looks.seen.elements())
        for thread in sorted(threads):
            bench.say(f"\n{thread}, {threads[thread]} looks")
            lines = [(count, place) for (own, place), count in looks.seen.most_common() if own == thread]
            bench.say(*(f"  {count:5d}  {place}" for count, place in lines[:MOST_LINES]))


def _clock(block: Callable[[int], None], steps: int) -> float:
    dist.barrier()
    return timed(lambda: block(steps)) / steps * 1e3


def run(options: argparse.Namespace) -> None:
    """Profile every kind that was asked for."""
    connect(options.device)
    with tempfile.TemporaryDirectory(prefix="profile-ranks-") as scratch:
        bench = Bench(options, Path(scratch))
        for kind in options.kinds:
            profile(bench, kind, options.steps)
            bench.clean()
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # recorders are open: nothing of theirs is of use


def main() -> None:
    """Parse and run; end at once where anything goes wrong on any rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--steps", type=int, default=8, help="steps in each look")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path)
    options: Any = parser.parse_args()
    try:
        run(options)
    except BaseException:  # noqa: BLE001  the other ranks may wait in a collective for ever
        print(f"rank {os.environ.get('RANK')}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(2)


if __name__ == "__main__":
    main()
