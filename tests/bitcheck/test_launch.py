"""`bitcheck run` around a program that has nothing to do with PyTorch: everything passes through."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bitcheck.errors import RecordingError, UsageError
from bitcheck.launch import Ending, _finish_run, attached_environment, join_run, package_folder, summarise_words
from bitcheck.ranks import is_first_of_host, launched_as
from bitcheck.run import create_run, open_run
from bitcheck.run_document import unrecorded_processes
from bitcheck.settings import VARIABLE, Options, Settings, parse_leaves, parse_steps, read_settings

BITCHECK = [sys.executable, "-m", "bitcheck"]


def run_bitcheck(
    folder: Path, *command: str, options: tuple[str, ...] = (), **keywords: object
) -> subprocess.CompletedProcess[bytes]:
    """Record `command` into `folder`."""
    full = [*BITCHECK, "run", "-o", str(folder), *options, "--", *command]
    return subprocess.run(full, capture_output=True, timeout=120, **keywords)  # type: ignore[call-overload, no-any-return]


def read_info(folder: Path) -> dict[str, object]:
    """Return run.json."""
    info = json.loads((folder / "run.json").read_text())
    assert isinstance(info, dict)
    return info


def python(*lines: str) -> list[str]:
    """Return the command that runs these lines."""
    return [sys.executable, "-c", "\n".join(lines)]


@pytest.mark.parametrize(
    ("lines", "exit_status", "status"),
    [
        (["pass"], 0, "complete"),
        (["raise SystemExit(3)"], 3, "failed"),
        (["raise ValueError"], 1, "failed"),
        (["import os, signal", "os.kill(os.getpid(), signal.SIGKILL)"], 137, "killed"),
        (["import os, signal", "os.kill(os.getpid(), signal.SIGTERM)"], 143, "killed"),
        (["import os", "os.abort()"], 134, "failed"),
        (["import os", "os._exit(7)"], 7, "failed"),
    ],
)
def test_the_exit_status_is_the_programs_own_and_the_run_says_how_it_ended(
    tmp_path: Path, lines: list[str], exit_status: int, status: str
) -> None:
    ended = run_bitcheck(tmp_path / "run", *python(*lines))
    info = read_info(tmp_path / "run")
    assert ended.returncode == exit_status
    assert (info["status"], info["exit_status"]) == (status, exit_status)
    assert info["ended"] is not None


def test_a_shells_word_for_a_killed_program_counts_as_killed(tmp_path: Path) -> None:
    ended = run_bitcheck(
        tmp_path / "run", "sh", "-c", f"{shlex.join(python('import os', 'os.kill(os.getpid(), 9)'))}; exit $?"
    )
    assert ended.returncode == 137
    assert read_info(tmp_path / "run")["status"] == "killed"


def test_standard_streams_pass_through_byte_for_byte(tmp_path: Path) -> None:
    program = python(
        "import sys",
        "data = sys.stdin.buffer.read()",
        "sys.stdout.buffer.write(data)",
        "sys.stderr.buffer.write(data[::-1])",
        "sys.stdout.buffer.flush()",
    )
    data = bytes(range(256)) * 400
    bare = subprocess.run(program, input=data, capture_output=True, timeout=60)
    ended = run_bitcheck(tmp_path / "run", *program, input=data)
    assert ended.stdout == bare.stdout == data
    assert ended.stderr.startswith(bare.stderr)
    own = ended.stderr[len(bare.stderr) :].decode()
    assert own.startswith("bitcheck: nothing was recorded: ") and own.count("\n") == 1


def test_descriptors_that_the_shell_handed_down_reach_the_program(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"from the shell")
    os.close(writing)
    program = python("import os", f"print(os.read({reading}, 100).decode())")
    ended = run_bitcheck(tmp_path / "run", *program, pass_fds=(reading,))
    os.close(reading)
    assert ended.stdout == b"from the shell\n"


def test_the_program_sees_the_path_modules_and_variables_that_it_would_see_bare(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "helper.py").write_text("NAME = 'mine'\n")
    program = python(
        "import helper, json, os, sys",
        "own = {'BITCHECK_ATTACH', 'PYTHONPATH'}",
        "print(json.dumps([sys.path, sys.argv, helper.NAME, 'sitecustomize' in sys.modules, os.getcwd(), ",
        "    {k: v for k, v in os.environ.items() if k not in own}, sorted(sys.path_importer_cache)]))",
    )
    path = os.pathsep.join([str(tmp_path / "mine"), os.environ["PYTHONPATH"]])
    variables = {**os.environ, "PYTHONPATH": path}
    bare = subprocess.run(program, capture_output=True, timeout=60, env=variables, cwd=tmp_path)
    ended = run_bitcheck(tmp_path / "run", *program, env=variables, cwd=tmp_path)
    assert json.loads(ended.stdout) == json.loads(bare.stdout)


def test_the_run_says_with_which_variables_the_command_was_started(tmp_path: Path) -> None:
    """Not with which ones it ended: what a program sets itself it sets again when it runs again."""
    program = python("import os", "os.environ['MKL_CBWR'] = 'AVX2'", "del os.environ['MALLOC_PERTURB_']")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MKL_", "MALLOC_"))}
    run_bitcheck(tmp_path / "run", *program, env=kept | {"MALLOC_PERTURB_": "85", "WANDB_API_KEY": "secret"})
    variables = read_info(tmp_path / "run")["variables"]
    assert isinstance(variables, dict)
    assert variables["MALLOC_PERTURB_"] == "85"
    assert variables.keys().isdisjoint({"MKL_CBWR", "WANDB_API_KEY", "PATH"})


def test_the_users_own_sitecustomize_runs_as_if_ours_were_not_there(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.mine = (__file__, __name__, __spec__.origin)\n")
    program = python("import sys, sitecustomize", "print(sys.mine, sitecustomize.__file__)")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    bare = subprocess.run(program, capture_output=True, timeout=60, env=variables)
    ended = run_bitcheck(tmp_path / "run", *program, env=variables)
    assert bare.returncode == 0
    assert ended.stdout == bare.stdout


def test_a_sitecustomize_that_fails_fails_as_it_does_bare(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('mine')\n")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    bare = subprocess.run(python("pass"), capture_output=True, timeout=60, env=variables)
    ended = run_bitcheck(tmp_path / "run", *python("pass"), env=variables)
    assert b"RuntimeError: mine" in bare.stderr
    # The launcher is itself a Python that runs it once, then the program does.
    assert ended.stderr.count(bare.stderr) == 2


def test_a_program_that_never_imports_torch_is_told_that_nothing_was_recorded(tmp_path: Path) -> None:
    ended = run_bitcheck(tmp_path / "run", *python("pass"))
    assert ended.returncode == 0
    assert b"nothing was recorded: no Python process that imports torch was seen" in ended.stderr
    (note,) = read_info(tmp_path / "run")["notes"]  # type: ignore[misc]
    assert note.startswith("nothing was recorded")


def fake_torch(folder: Path, source: str) -> dict[str, str]:
    """Make a module that is called torch; return variables with which it is found before any other."""
    folder.mkdir()
    (folder / "torch.py").write_text(source)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])}


def test_a_program_whose_python_lacks_what_bitcheck_needs_goes_on_and_is_told_once(tmp_path: Path) -> None:
    variables = fake_torch(tmp_path / "fake", "VERSION = 1\n")  # it has no torch.distributed
    lines = ["import torch", "print(torch.VERSION, torch.__loader__.__class__.__name__)"]
    ended = run_bitcheck(tmp_path / "run", "sh", "-c", "; ".join([shlex.join(python(*lines))] * 2), env=variables)
    assert (ended.returncode, ended.stdout) == (0, b"1 SourceFileLoader\n" * 2)
    assert ended.stderr.count(b"\n") == 1
    assert b"the program runs unrecorded: its Python" in ended.stderr
    (note,) = read_info(tmp_path / "run")["notes"]  # type: ignore[misc]
    assert "ran unrecorded" in note


def test_an_import_of_torch_that_fails_at_first_is_still_waited_for(tmp_path: Path) -> None:
    source = "import os\nif os.environ.pop('FIRST', ''): raise ImportError('not yet')\n"
    variables = {**fake_torch(tmp_path / "fake", source), "FIRST": "1"}
    program = python("try:", "    import torch", "except ImportError as error:", "    print(error)", "import torch")
    ended = run_bitcheck(tmp_path / "run", *program, env=variables)
    assert ended.stdout == b"not yet\n"
    assert b"the program runs unrecorded" in ended.stderr  # the second import was seen, and this torch is too small


def started(folder: Path, *lines: str) -> subprocess.Popen[bytes]:
    """Start recording a program, in a process group of its own, and wait for its first line."""
    command = [*BITCHECK, "run", "-o", str(folder), "--", *python(*lines)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_ctrl_c_reaches_the_program_exactly_once_and_the_launcher_waits_for_it(tmp_path: Path) -> None:
    process = started(
        tmp_path / "run",
        "import os, signal, sys, time",
        "reading, writing = os.pipe()",
        "os.set_blocking(writing, False)",
        "signal.set_wakeup_fd(writing)",  # a byte a signal, where Python's handlers make one of several
        "signal.signal(signal.SIGINT, lambda *_: None)",
        "print('ready', flush=True)",
        "time.sleep(1)",
        "print(len(os.read(reading, 100))); sys.exit(5)",
    )
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (5, b"1\n")


def test_ctrl_c_that_ends_the_program_gives_130_and_a_failed_run(tmp_path: Path) -> None:
    process = started(tmp_path / "run", "import time", "print('ready', flush=True)", "time.sleep(60)")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.count(b"KeyboardInterrupt") == 1
    assert read_info(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_sent_to_the_launcher_is_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    process = started(
        tmp_path / "run",
        "import signal, sys, time",
        f"signal.signal({int(number)}, lambda *_: sys.exit(9))",
        "print('ready', flush=True)",
        "time.sleep(60)",
    )
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 9


def test_a_signal_that_nohup_had_ignored_stays_ignored(tmp_path: Path) -> None:
    program = python("import signal", "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)")
    command = [*BITCHECK, "run", "-o", str(tmp_path / "run"), "--", *program]
    ended = subprocess.run(["nohup", *command], capture_output=True, timeout=60, cwd=tmp_path)
    assert ended.stdout == b"True\n"


def test_a_folder_that_holds_a_run_is_refused_before_the_program_starts(tmp_path: Path) -> None:
    run_bitcheck(tmp_path / "run", *python("pass"))
    before = read_info(tmp_path / "run")
    refused = run_bitcheck(tmp_path / "run", *python("print('started')"))
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"--overwrite" in refused.stderr
    assert read_info(tmp_path / "run") == before
    replaced = run_bitcheck(tmp_path / "run", *python("print('started')"), options=("--overwrite",))
    assert (replaced.returncode, replaced.stdout) == (0, b"started\n")
    assert read_info(tmp_path / "run")["run_id"] != before["run_id"]


def test_a_program_that_does_not_exist_ends_as_in_a_shell_and_leaves_no_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("pass\n")
    missing = run_bitcheck(tmp_path / "run", "no-such-program")
    plain = run_bitcheck(tmp_path / "run", str(script))
    assert (missing.returncode, plain.returncode) == (127, 126)
    assert b"no-such-program" in missing.stderr and b"not executable" in plain.stderr
    assert not (tmp_path / "run").exists()


def test_a_file_that_the_kernel_cannot_execute_leaves_the_folder_free(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nothing")
    broken.chmod(0o755)
    assert run_bitcheck(tmp_path / "run", str(broken)).returncode == 126
    assert run_bitcheck(tmp_path / "run", *python("pass")).returncode == 0


def test_options_of_the_program_are_not_taken_for_ours(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "-o", "x", "--level", "--", "-h"]
    ended = run_bitcheck(tmp_path / "run", *program)
    bare = subprocess.run([*BITCHECK, "run", "-o", str(tmp_path / "bare"), *program], capture_output=True, timeout=60)
    assert ended.stdout == bare.stdout == b"['-o', 'x', '--level', '--', '-h']\n"


def test_the_launcher_starts_without_torch_numpy_or_hdf5() -> None:
    lines = [
        "import sys, bitcheck.cli.run, bitcheck.launch, bitcheck.run",
        "print([name for name in ('torch', 'numpy', 'h5py') if name in sys.modules])",
    ]
    assert subprocess.run(python(*lines), capture_output=True, timeout=60).stdout == b"[]\n"


def test_settings_survive_the_environment_variable() -> None:
    settings = Settings("/a", "/b", "/c", "id", Options("op", "2:", 3, 4, "all", True), {"1": 5}, "/d")
    variables = attached_environment(settings, {"PYTHONPATH": "/x" + os.pathsep})
    assert read_settings(json.loads(variables[VARIABLE])) == settings
    bootstrap = str(package_folder() / "hooks" / "bootstrap")
    assert variables["PYTHONPATH"].split(os.pathsep) == [bootstrap, "/x", ""]
    nested = attached_environment(settings, variables)
    assert nested["PYTHONPATH"] == variables["PYTHONPATH"], "a run within a run does not repeat the folder"


def test_rank_and_job_come_from_the_launcher_that_is_nearest() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}
    assert launched_as({}) is None
    assert launched_as(slurm) == (3, 4, "17.0")
    assert launched_as(slurm | {"RANK": "9", "WORLD_SIZE": "32"}) == (9, 32, "")
    assert launched_as({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}) == (1, 2, "")
    assert launched_as({"PMI_RANK": "0", "PMI_SIZE": "2"}) == (0, 2, "")
    assert launched_as({"RANK": "", "WORLD_SIZE": "two"}) is None


def test_the_first_process_of_a_host_is_the_one_that_its_launcher_numbers_0() -> None:
    assert [is_first_of_host({"LOCAL_RANK": number, "SLURM_LOCALID": "0"}) for number in "01"] == [True, False]
    assert is_first_of_host({"SLURM_LOCALID": "0"})
    with pytest.raises(UsageError, match="Set LOCAL_RANK"):
        is_first_of_host({"RANK": "0"})


def test_a_slurm_batch_script_is_one_process_whatever_the_job_has() -> None:
    assert launched_as({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "17"}) is None


def test_launchers_of_one_job_share_a_run_and_one_that_fails_fails_it(tmp_path: Path) -> None:
    program = python(
        "import os, sys, time", "time.sleep(0.5 * (os.environ['RANK'] == '0'))", "sys.exit(4 * int(os.environ['RANK']))"
    )
    variables = {**os.environ, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job"}
    command = [*BITCHECK, "run", "-o", str(tmp_path / "run"), "--", *program]
    ranks = [
        subprocess.Popen(command, env={**variables, "RANK": rank}, stderr=subprocess.DEVNULL) for rank in ("1", "0")
    ]
    assert [process.wait(60) for process in ranks] == [4, 0]
    info = read_info(tmp_path / "run")
    assert (info["status"], info["exit_status"], info["world_size"]) == ("failed", 4, 2)


def test_a_launcher_that_finds_no_run_of_its_job_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"status": "recording", "job": "another", "run_id": "x"}))
    with pytest.raises(RecordingError, match="rank 0 made no run here"):
        join_run(tmp_path, "mine", timeout_s=0.1)
    assert join_run(tmp_path, "another", timeout_s=0.1) == "x"


def test_what_went_unrecorded_is_counted_by_rank() -> None:
    words = [{"what": "attached"}, {"what": "claimed", "rank": 0, "world_size": 1}, {"what": "stepped"}]
    assert summarise_words(words, Options()) == []
    refused = summarise_words([*words, *[{"what": "refused", "rank": 0}] * 2], Options())
    assert [note.text.split(" trained")[0] for note in refused] == ["2 more processes of rank 0"]


def test_launchers_of_one_run_add_up_what_went_unrecorded(tmp_path: Path) -> None:
    create_run(tmp_path / "run", {"level": "module", "world_size": 2}, overwrite=False)
    for rank, count in ((0, 1), (1, 2), (0, 1)):
        _finish_run(tmp_path / "run", Ending(0), [{"what": "refused", "rank": rank}] * count, Options(), False)
    with open_run(tmp_path / "run", allow_missing_ranks=True) as run:
        assert unrecorded_processes(run.info) == {0: 2, 1: 2}


def test_a_run_without_steps_names_the_likeliest_cause() -> None:
    attached = {"what": "attached"}
    claimed = {"what": "claimed", "rank": 0, "world_size": 1}
    ended = {"what": "ended", "taken": 3, "kept": 0}

    def told(*words: dict[str, object]) -> str:
        (note,) = summarise_words(words, Options(steps="10:20"))
        return note.text

    assert "imports torch was seen" in told()
    assert "no torch.nn.Module ran" in told(attached)
    assert "no torch.optim.Optimizer stepped" in told(attached, claimed)
    assert "took 3 steps, none of those of --steps 10:20" in told(attached, claimed, {"what": "stepped"}, ended)


@pytest.mark.parametrize(
    ("text", "expected"), [("2:5", (2, 5)), (":5", (0, 5)), ("7:", (7, None)), (":", (0, None)), (" 1 : 2 ", (1, 2))]
)
def test_steps_are_a_half_open_range(text: str, expected: tuple[int, int | None]) -> None:
    assert parse_steps(text) == expected


@pytest.mark.parametrize("text", ["5", "5:5", "6:2", "a:b", "-1:3", "1:2:3", ""])
def test_steps_that_hold_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_steps(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", "all"), ("NONE", "none"), ("1MiB", 2**20), ("64 KiB", 65536), ("0", 0), ("4096", 4096), ("2gib", 2**31)],
)
def test_leaves_are_a_word_or_a_size(text: str, expected: str | int) -> None:
    assert parse_leaves(text) == expected


@pytest.mark.parametrize("text", ["", "some", "1MB", "-1", "1.5MiB"])
def test_leaves_that_are_neither_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_leaves(text)
