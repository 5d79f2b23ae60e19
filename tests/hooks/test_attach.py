"""`bitcheck run` around programs that train: what is recorded, by which process, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest

from bitcheck.answer import Verdict
from bitcheck.diff import diff_runs
from bitcheck.events import StepKind
from bitcheck.run import Run, open_run

BITCHECK = [sys.executable, "-m", "bitcheck"]

TRAIN = """
import multiprocessing, os, signal, sys, time
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)


def train(batches, width=4):
    model = nn.Linear(width, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def batches(count=3):
    return [torch.randn(2, 4) for _ in range(count)]


"""
"""Top of the programs: `for _ in train(batches()): pass` trains three steps."""

ALL_STEPS = [
    (-1, StepKind.INITIAL),
    (0, StepKind.STEP),
    (1, StepKind.STEP),
    (2, StepKind.STEP),
    (3, StepKind.FRAGMENT),
]
MAIN = "if __name__ == '__main__':\n    "


def write_program(folder: Path, body: str) -> Path:
    """Write a program that may call `train`."""
    path = folder / "program.py"
    path.write_text(TRAIN + textwrap.dedent(body))
    return path


def record(
    folder: Path, body: str, *, options: tuple[str, ...] = (), variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Record a program into folder/run."""
    program = write_program(folder, body)
    return record_command(folder, sys.executable, str(program), options=options, variables=variables)


def record_command(
    folder: Path, *command: str, options: tuple[str, ...] = (), variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Record a command into folder/run."""
    return subprocess.run(
        [*BITCHECK, "run", "-o", str(folder / "run"), *options, "--", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
        cwd=folder,
        capture_output=True,
        timeout=240,
    )


def steps_of(run: Run, rank: int = 0) -> list[tuple[int, int]]:
    """Return (number, kind) of every recorded row of a rank."""
    return [(int(row["step"]), int(row["kind"])) for row in run.rank(rank).table]


def assert_sound(folder: Path) -> None:
    """Check every root and chain of folder/run."""
    checked = subprocess.run([*BITCHECK, "verify", str(folder / "run")], capture_output=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_program_is_recorded_whole_and_says_nothing_more_than_bare(tmp_path: Path) -> None:
    ended = record(tmp_path, "for _ in train(batches()): print('step')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"step\n" * 3, b"")
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == ALL_STEPS
        assert (run.status, run.rank(0).status, run.world_size) == ("complete", "complete", 1)
        assert run.environment["torch.num_threads"] == "1"
        assert run.info["notes"] == []
    assert_sound(tmp_path)


@pytest.mark.parametrize(
    ("end", "exit_status", "status", "rank_status", "last"),
    [
        ("sys.exit(3)", 3, "failed", "complete", 3),
        ("raise ValueError('no')", 1, "failed", "failed", 3),
        ("raise SystemExit", 0, "complete", "complete", 3),
        # The model is gone when its training function returns: that ended step 2, and nothing comes after.
        ("time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)", 137, "killed", "killed", 2),
    ],
)
def test_the_run_and_its_rank_say_how_the_program_ended(
    tmp_path: Path, end: str, exit_status: int, status: str, rank_status: str, last: int
) -> None:
    ended = record(tmp_path, f"for _ in train(batches()): pass\n{end}\n")
    assert ended.returncode == exit_status
    with open_run(tmp_path / "run") as run:
        assert (run.status, run.info["status"], run.rank(0).status) == (status, status, rank_status)
        assert steps_of(run)[-1][0] == last
    assert_sound(tmp_path)


def test_a_global_hook_of_the_program_behind_ours_still_runs(tmp_path: Path) -> None:
    body = """
    for _ in train(batches()): pass
    child = os.fork()
    if child == 0:
        from torch.optim.optimizer import register_optimizer_step_post_hook
        register_optimizer_step_post_hook(lambda *_: print("hook"))
        for _ in train(batches()): pass
        sys.exit()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    ended = record(tmp_path, body)
    assert (ended.returncode, ended.stdout) == (0, b"hook\n" * 3), ended.stderr


def test_ctrl_c_leaves_the_finished_steps_and_a_failed_run(tmp_path: Path) -> None:
    program = write_program(tmp_path, "for _ in train(batches()): pass\nprint('ready', flush=True)\ntime.sleep(60)\n")
    command = [*BITCHECK, "run", "-o", str(tmp_path / "run"), "--", sys.executable, str(program)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.count(b"KeyboardInterrupt")) == (130, 1)
    with open_run(tmp_path / "run") as run:
        assert (run.status, run.rank(0).status) == ("failed", "failed")
        assert steps_of(run)[:4] == ALL_STEPS[:4]


def test_modules_scripts_and_shells_are_entered_alike(tmp_path: Path) -> None:
    write_program(tmp_path, "for _ in train(batches()): pass\n")
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/sh\ntrue && {shlex.quote(sys.executable)} -m program\n")
    script.chmod(0o755)
    assert record_command(tmp_path, str(script)).returncode == 0
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == ALL_STEPS


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader_workers_record_nothing_whatever_they_run(tmp_path: Path, method: str) -> None:
    body = f"""
    class Data(torch.utils.data.Dataset):
        def __init__(self):
            self.net = nn.Linear(4, 4)

        def __len__(self):
            return 6

        def __getitem__(self, index):
            return self.net(torch.full((4,), float(index))).detach()


    if __name__ == "__main__":
        loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="{method}")
        for _ in train(loader): pass
    """
    ended = record(tmp_path, body)
    assert (ended.returncode, ended.stderr) == (0, b"")
    with open_run(tmp_path / "run") as run:
        assert (steps_of(run), run.status) == (ALL_STEPS, "complete")
        assert run.info["notes"] == []
    assert_sound(tmp_path)


def test_a_forked_process_records_nothing_and_is_counted_if_it_trains(tmp_path: Path) -> None:
    body = """
    for step, _ in enumerate(train(batches())):
        if step == 1:
            child = os.fork()
            if child == 0:
                for _ in train(batches(5)): pass
                sys.exit(0)
            os.waitpid(child, 0)
    """
    ended = record(tmp_path, body)
    assert ended.returncode == 0
    assert ended.stderr.startswith(b"bitcheck: one more process of rank 0 trained and went unrecorded")
    with open_run(tmp_path / "run") as run:
        assert (steps_of(run), run.status) == (ALL_STEPS, "complete")
        assert len(run.info["notes"]) == 1
    assert_sound(tmp_path)


def test_where_a_child_takes_the_recording_the_answer_is_not_about_the_whole_program(tmp_path: Path) -> None:
    body = """
    child = os.fork()
    if child == 0:
        for _ in train(batches()): pass
        sys.exit(0)
    os.waitpid(child, 0)
    torch.manual_seed(int("/other/" in __file__))
    for _ in train(batches(5)): pass
    """
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        assert record(tmp_path / name, body).returncode == 0
    with open_run(tmp_path / "one/run") as ours, open_run(tmp_path / "other/run") as theirs:
        assert steps_of(ours) == ALL_STEPS
        answer = diff_runs(ours, theirs)
    assert answer.verdict is Verdict.IDENTICAL
    assert [facts.unrecorded for facts in answer.runs] == [{0: 1}] * 2
    assert "In both runs 1 more process of rank 0 trained and went unrecorded" in answer.explanation


def test_of_two_programs_in_one_command_the_first_that_trains_is_recorded(tmp_path: Path) -> None:
    program = write_program(tmp_path, "for _ in train(batches(int(sys.argv[1]))): pass\n")
    one = shlex.join([sys.executable, str(program)])
    ended = record_command(tmp_path, "sh", "-c", f"{one} 3 && {one} 1 && {one} 2", options=("--strict",))
    assert ended.returncode == 0
    assert b"2 more processes of rank 0 trained and went unrecorded" in ended.stderr
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == ALL_STEPS


def test_a_process_that_is_refused_in_the_middle_of_a_step_goes_on_with_the_programs_own_hooks(tmp_path: Path) -> None:
    body = """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda *_: print("hook"))
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
    """
    one = shlex.join([sys.executable, str(write_program(tmp_path, body))])
    ended = record_command(tmp_path, "sh", "-c", f"{one} && {one}")
    assert (ended.returncode, ended.stdout) == (0, b"hook\n" * 4), ended.stderr


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_that_a_program_starts_as_its_ranks_are_recorded_each(tmp_path: Path, method: str) -> None:
    body = f"""
    import torch.distributed as dist


    def work(rank, folder):
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{{folder}}/store")
        for _ in train(batches()): pass
        time.sleep(0.2)
        dist.destroy_process_group()


    if __name__ == "__main__":
        torch.multiprocessing.start_processes(work, args=(os.getcwd(),), nprocs=2, start_method="{method}")
    """
    ended = record(tmp_path, body)
    assert (ended.returncode, ended.stderr) == (0, b"")
    with open_run(tmp_path / "run") as run:
        assert (run.world_size, run.ranks, run.status) == (2, [0, 1], "complete")
        assert steps_of(run, 0) == steps_of(run, 1) == ALL_STEPS


def test_a_rank_that_fails_in_a_forked_process_says_so(tmp_path: Path) -> None:
    body = """
    def work():
        for _ in train(batches()): pass
        raise ValueError("no")


    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    """
    assert record(tmp_path, body).returncode == 0
    with open_run(tmp_path / "run") as run:
        assert (run.info["status"], run.rank(0).status) == ("complete", "failed")
        assert steps_of(run)[:4] == ALL_STEPS[:4]


def test_torchrun_gives_a_rank_a_file_and_its_launcher_none(tmp_path: Path) -> None:
    program = write_program(tmp_path, "for _ in train(batches()): pass\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = record_command(tmp_path, *launcher, str(program))
    assert ended.returncode == 0
    with open_run(tmp_path / "run") as run:
        assert (run.world_size, run.ranks, run.status) == (2, [0, 1], "complete")
        assert steps_of(run, 0) == steps_of(run, 1) == ALL_STEPS


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("pass", b"no torch.nn.Module ran"),
        ("with torch.no_grad(): nn.Linear(4, 1)(torch.ones(2, 4))", b"no torch.nn.Module ran with gradients enabled"),
        ("nn.Linear(4, 1)(torch.ones(2, 4)).sum().backward()", b"no torch.optim.Optimizer stepped"),
    ],
)
def test_a_program_that_never_steps_is_told_why_nothing_was_recorded(tmp_path: Path, body: str, reason: bytes) -> None:
    ended = record(tmp_path, body)
    assert ended.returncode == 0
    assert ended.stderr.startswith(b"bitcheck: nothing was recorded: ")
    assert reason in ended.stderr
    assert ended.stderr.count(b"\n") == 1


def test_the_options_reach_the_recorder(tmp_path: Path) -> None:
    options = ("--level", "state", "--start-step", "10", "--steps", "11:", "--every", "2", "--leaves", "none")
    assert record(tmp_path, "for _ in train(batches(5)): pass\n", options=options).returncode == 0
    with open_run(tmp_path / "run") as run:
        assert (run.level, run.info["start_step"], run.info["steps"]) == ("state", 10, "11:")
        assert [step for step, kind in steps_of(run) if kind == StepKind.STEP] == [12, 14]
        loaded = run.rank(0).load(1)
        assert not any(loaded.leaves(event) for event in range(len(loaded.sites)))


def test_a_program_of_another_environment_is_recorded_without_bitcheck_on_its_path(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    body = """
    for _ in train(batches()): pass
    import importlib.machinery
    print([entry for entry in sys.path if importlib.machinery.PathFinder.find_spec("bitcheck", [entry])])
    """
    packages = sysconfig.get_path("purelib")
    program = write_program(tmp_path, body)
    launcher = f"import os, sys\nos.environ['PYTHONPATH'] = {packages!r}\nfrom bitcheck.cli import main\nmain()\n"
    command = [sys.executable, "-c", launcher, "run", "-o", str(tmp_path / "run"), "--"]
    ended = subprocess.run(
        [*command, str(tmp_path / "venv" / "bin" / "python"), str(program)],
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, b"[]\n"), ended.stderr
    with open_run(tmp_path / "run") as run:
        assert steps_of(run) == ALL_STEPS


def test_a_python_without_hdf5_trains_on_unrecorded_and_strict_makes_it_fail(tmp_path: Path) -> None:
    (tmp_path / "h5py.py").write_text("raise ModuleNotFoundError(\"No module named 'h5py'\", name='h5py')\n")
    body = "for _ in train(batches()): print('step')"
    ended = record(tmp_path, body)
    assert (ended.returncode, ended.stdout) == (0, b"step\n" * 3)
    assert b"lacks what bitcheck needs: No module named 'h5py'" in ended.stderr
    assert ended.stderr.count(b"\n") == 1
    assert "h5py" in json.loads((tmp_path / "run" / "run.json").read_text())["notes"][0]
    strict = record(tmp_path, body, options=("--overwrite", "--strict"))
    assert (strict.returncode, strict.stdout) == (1, b"")


def test_a_folder_that_is_gone_lets_the_training_go_on(tmp_path: Path) -> None:
    ended = record(tmp_path, "import shutil\nshutil.rmtree('run')\nfor _ in train(batches()): print('step')")
    assert (ended.returncode, ended.stdout) == (0, b"step\n" * 3)
    assert b"bitcheck: " in ended.stderr and b"Traceback" not in ended.stderr


def test_recording_changes_neither_bits_nor_generators_nor_what_a_program_sees_of_python(tmp_path: Path) -> None:
    body = """
    import hashlib, pickle, random
    import numpy
    random.seed(1); numpy.random.seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches():
        model(batch).mean().backward(); optimizer.step(); optimizer.zero_grad()
        random.random(); numpy.random.random()
    generators = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()]
    state = [model.state_dict(), optimizer.state_dict(), *generators]
    print(hashlib.sha256(pickle.dumps(repr(state))).hexdigest(), [p.sum().item().hex() for p in model.parameters()])
    print(torch.__loader__.__class__, torch.__spec__.loader is torch.__loader__, vars(torch.__loader__).keys())
    print(sys.excepthook is sys.__excepthook__, sys.meta_path)
    """
    program = write_program(tmp_path, body)
    bare = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120
    )
    ended = record(tmp_path, body)
    without_addresses = [re.sub(rb"0x[0-9a-f]+", b"", text) for text in (ended.stdout, bare.stdout)]
    assert bare.returncode == 0
    assert without_addresses[0] == without_addresses[1]
