from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bitcheck import demo
from bitcheck.cli import main
from bitcheck.errors import ProgramFailed, UsageError


def test_the_demo_proves_three_runs_equal_and_finds_the_switched_kernel(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo.play(tmp_path / "demo", overwrite=False, config="nano", steps=4) == []
    told = capfd.readouterr().out
    assert told.count("IDENTICAL over ") == 2
    assert "DIVERGED in step 0: backward/" in told
    commands = [line for line in told.splitlines() if line.startswith("$ bitcheck ")]
    assert len(commands) == 7
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == sorted(demo.FOLDERS)


def test_a_demo_whose_answers_are_not_as_told_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is not switched, and the resumed run forgets its position in the data."""
    run = demo._run

    def sabotaged(command: list[str]) -> None:
        if "--set" in command:
            place = command.index("--set")
            del command[place : place + 2]
        if "--resume" in command:
            command += ["--leave-out", "data"]
        run(command)

    monkeypatch.setattr(demo, "_run", sabotaged)
    wrong = demo.play(tmp_path, overwrite=False, config="nano", steps=2)
    assert "resumed: not identical" in wrong
    assert "one kernel switched: not diverged" in wrong
    assert not any(sentence.startswith("fresh again") for sentence in wrong)


@pytest.mark.parametrize(("wrong", "status"), [([], 0), (["resumed: not identical"], 1)])
def test_the_exit_status_of_the_demo_is_its_verdict(
    wrong: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "play", lambda folder, overwrite: wrong)
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == status
    assert ("NOT AS TOLD: resumed: not identical" in done.stderr) == bool(wrong)


def test_an_earlier_demo_is_replaced_only_when_asked_and_nothing_else_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fresh").mkdir()
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="holds an earlier demo"):
        demo.play(tmp_path, overwrite=False)

    def failing(command: list[str]) -> None:
        raise ProgramFailed("stopped here")

    monkeypatch.setattr(demo, "_run", failing)
    with pytest.raises(ProgramFailed):
        demo.play(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_trainer_that_fails_is_trouble_and_not_a_verdict() -> None:
    with pytest.raises(ProgramFailed, match="ended with status 2"):
        demo._run(["bitcheck", "reference", "train", "--no-such-option"])
