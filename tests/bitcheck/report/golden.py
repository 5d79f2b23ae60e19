"""The reports that are compared whole, and the way to write them again after a change that was meant.

    python -m tests.bitcheck.report.golden

Then read the difference before it is committed.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.events import Level
from bitcheck.report.text import print_answer
from tests.bitcheck.made_up_runs import NUM_BLOCKS, make_run

FOLDER = Path(__file__).parent / "golden"

MOMENTS = [f"optim/blocks.{block}.weight:momentum_buffer" for block in range(NUM_BLOCKS)]


def _fault(site: str, **plan: object) -> Answer:
    return diff_runs(make_run(**plan), make_run(**plan, faults=[(0, 2, site)]))


REPORTS: dict[str, Callable[[], Answer]] = {
    "identical": lambda: diff_runs(make_run(), make_run()),
    "identical_ranks": lambda: diff_runs(make_run(num_ranks=4), make_run(num_ranks=4)),
    "data": lambda: diff_runs(
        make_run(environment={"env.PYTHONHASHSEED": "1"}),
        make_run(environment={"env.PYTHONHASHSEED": "2"}, data_seed=1),
    ),
    "rng": lambda: diff_runs(make_run(), make_run(seeds={"torch.cpu": 1})),
    "forward": lambda: _fault("forward/blocks.1:out"),
    "loss_of_level_state": lambda: _fault("loss/loss:value", level=Level.STATE),
    "backward": lambda: _fault("backward/blocks.1:grad_in.0"),
    "compute": lambda: _fault("grad/blocks.1.weight:grad", level=Level.STATE),
    "optimizer": lambda: _fault("param/blocks.1.weight:value"),
    "buffer": lambda: _fault("buffer/blocks.0.mean:value"),
    "hyperparameter": lambda: diff_runs(make_run(), make_run(lr={2: 0.05})),
    "collective": lambda: diff_runs(
        make_run(num_ranks=3),
        make_run(num_ranks=3, faults=[(rank, 1, "grad/blocks.1.weight:grad") for rank in range(3)]),
    ),
    "structure": lambda: diff_runs(
        make_run(), make_run(skipped=[(0, 2, "forward/blocks.1:in.0"), (0, 2, "forward/blocks.1:out")])
    ),
    "restore": lambda: diff_runs(
        make_run(num_steps=6), make_run(start_step=3, num_steps=3, explicit_start=True, lost=MOMENTS)
    ),
    "initial_state": lambda: diff_runs(make_run(), make_run(faults=[(0, -1, "param/blocks.0.weight:value")])),
    "ended_early": lambda: diff_runs(make_run(num_steps=6), make_run(num_steps=6, num_recorded=4, status="killed")),
    "several_origins": lambda: diff_runs(
        make_run(num_ranks=3),
        make_run(num_ranks=3, faults=[(2, 1, "forward/blocks.1:out"), (0, 1, "backward/blocks.2.weight:grad")]),
    ),
    "one_fault_on_every_rank": lambda: diff_runs(
        make_run(num_ranks=9),
        make_run(num_ranks=9, faults=[(rank, 1, "forward/blocks.1:out") for rank in (0, 1, 2, 3, 5, 6, 8)]),
    ),
    "incomparable": lambda: diff_runs(make_run(num_steps=2), make_run(start_step=4, num_steps=2, explicit_start=True)),
}


def render(name: str) -> str:
    """Return a report as it is written into a pipe."""
    out = io.StringIO()
    print_answer(REPORTS[name](), file=out)
    return out.getvalue()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for report in REPORTS:
        (FOLDER / f"{report}.txt").write_text(render(report), encoding="utf-8")
