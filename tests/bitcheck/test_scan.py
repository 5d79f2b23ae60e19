"""The answer of a scan, and the table of what helps. One program is run in earnest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitcheck.errors import ProgramFailed
from bitcheck.remedies import SWITCHES, find_switch
from bitcheck.scan import describe, gather, headline, read_reports, scan_program


def report(**changes: Any) -> dict[str, Any]:
    finding = {
        "kind": "race",
        "phase": "backward",
        "module": "net.emb",
        "op": "aten.index_put_.default",
        "node": "IndexBackward0",
        "line": "train.py:31 in forward",
        "first_step": 2,
        "disagreed": 3,
        "executed": 10,
        "outputs": ["self.written"],
        "elements": 7,
        "of": 64,
    }
    return {"executed": 100, "steps": 10, "skipped": {"x": 1}, "findings": [finding | changes]}


def test_ranks_join_into_one_finding_an_operation() -> None:
    answer = gather({0: report(), 1: report(disagreed=1, first_step=1, elements=9)}, poison=False)
    (finding,) = answer.findings
    assert (finding.disagreed, finding.executed, finding.first_step, finding.elements) == (4, 20, 1, 9)
    assert finding.ranks == (0, 1) and answer.executed == 200 and answer.skipped == {"x": 2}
    assert answer.exit_status == 1


def test_a_scan_that_stopped_is_never_clean() -> None:
    stopped = "step 3: recording failed"
    with pytest.raises(ProgramFailed, match="stopped on rank 1, so nothing is known"):
        gather({0: report() | {"findings": []}, 1: report() | {"findings": [], "stopped": stopped}}, poison=False)
    answer = gather({0: report(), 1: report() | {"stopped": stopped}}, poison=False)
    assert answer.findings and any(stopped in phrase for phrase in answer.skipped)


def test_other_kinds_and_modules_are_findings_of_their_own() -> None:
    answer = gather({0: report(), 1: report(kind="uninitialised"), 2: report(module="net.head", disagreed=9)}, True)
    assert [(each.kind, each.module) for each in answer.findings] == [
        ("race", "net.head"),
        ("race", "net.emb"),
        ("uninitialised", "net.emb"),
    ]
    assert "torch.empty" in answer.findings[2].remedy


def test_an_answer_names_operation_module_count_line_and_remedy() -> None:
    answer = gather({0: report()}, poison=False)
    text = "\n".join(line for _, lines in describe(answer) for line in lines)
    for part in ("aten.index_put_.default in IndexBackward0", "net.emb, backward", "3 of 10", "train.py:31", "7 of 64"):
        assert part in text
    assert "torch.use_deterministic_algorithms(True)" in text
    assert headline(answer).startswith("FOUND 1 operation that disagrees")
    assert answer.to_json()["findings"][0]["covered"] is True


def test_a_rank_that_left_nothing_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "rank-00003.json").touch()
    with pytest.raises(ProgramFailed, match="rank 3"):
        read_reports(tmp_path)


@pytest.mark.parametrize(
    ("op", "is_covered"),
    [
        ("aten.index_put_.default", True),
        ("aten.index_put.default", True),
        ("aten.scatter_add_.default", True),
        ("aten.embedding_dense_backward.default", True),
        ("aten.mm.default", False),
        ("aten._scaled_dot_product_flash_attention_backward.default", True),
        ("triton.add_kernel", False),
    ],
)
def test_the_table_says_which_operations_the_switch_covers(op: str, is_covered: bool) -> None:
    switch = find_switch(op)
    assert switch is not None and switch.is_covered is is_covered and switch.advice


def test_an_unknown_operation_has_no_switch_and_still_some_advice() -> None:
    assert find_switch("mylib.fused.default") is None
    answer = gather({0: report(op="mylib.fused.default")}, poison=False)
    assert answer.findings[0].to_json()["covered"] is None and "atomic" in answer.findings[0].remedy


def test_every_switch_is_reached() -> None:
    assert len({switch.op for switch in SWITCHES}) == len(SWITCHES)


PROGRAM = """
import random, torch
from torch import nn
library = torch.library.Library("wobbly", "DEF")
library.define("add(Tensor x) -> Tensor")
library.impl("add", lambda x: x + random.SystemRandom().random(), "CPU")
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    loss = net(torch.randn(2, 4)).sum() + torch.ops.wobbly.add(torch.ones(3)).sum()
    loss.backward()
    optimizer.step()
"""


def test_a_program_is_scanned_without_a_change_to_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    scan = [sys.executable, "-m", "bitcheck", "scan", "--json", "--", sys.executable, str(path)]
    found = subprocess.run(scan, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stderr
    answer = json.loads(found.stdout)
    assert answer["schema"] == "bitcheck.scan/1" and answer["steps"] == 3
    assert [(each["op"], each["disagreed"]) for each in answer["findings"]] == [("wobbly.add.default", 3)]


def test_a_program_that_fails_or_trains_nothing_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match="exit status 3"):
        scan_program([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ProgramFailed, match="nothing was scanned"):
        scan_program([sys.executable, "-c", "pass"])
