"""Planted faults at level `op`: one bit of one result of one operation, and is that operation what `diff` names?

    python benchmarks/op_faults.py [--json FILE] [--only TEXT]

A small model runs most kinds of operations: in-place and through views, several outputs, custom
functions and operators, recompute, drawing, clipping, two optimizers. A dispatch mode below the
recorder changes the lowest bit of one element of one result of the n-th call of an operator, in the second
of three steps; nothing else is touched. Each fault has a twin in which the mode only counts.

A fault is *right* where the one origin of the step is that very result; *missed* where it is no
origin; and whatever else is called an origin is *false*.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.events import Level, StepRecord
from bitcheck.hooks.dynamo import UnseenMode, is_quiet
from bitcheck.hooks.modules import named_tensors
from bitcheck.hooks.op_schema import OpFacts, facts_of, named_arguments
from bitcheck.hooks.recorder import Recorder
from bitcheck.memory import MemoryRun, MemoryStore

STEPS, FAULTY_STEP = 3, 1
WANTED = 40

_library = torch.library.Library("bitcheck_op_faults", "DEF")
_library.define("rescale(Tensor x, float by) -> Tensor")
_library.impl("rescale", lambda x, by: x * by, "CPU")
_library.define("shift_(Tensor(a!) x, Tensor by) -> ()")


def _shift(x: torch.Tensor, by: torch.Tensor) -> None:
    x.add_(by)


_library.impl("shift_", _shift, "CPU")


class Cube(torch.autograd.Function):
    """A custom function with two outputs and a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x * x * x, torch.sin(x)

    @staticmethod
    def backward(ctx: Any, cubed: torch.Tensor, wave: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gradient: torch.Tensor = 3 * x * x * cubed + torch.cos(x) * wave
        return gradient


class Table(nn.Module):
    """Embedding, gathering, scattering."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(16, 8)
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens) + self.weight[tokens]
        sums = torch.zeros(16, 8).index_add(0, tokens.flatten(), x.flatten(0, 1))
        sums = sums.scatter_add(0, tokens.flatten()[:4].unsqueeze(1).expand(4, 8), x.flatten(0, 1)[:4])
        return torch.cat([x, sums[tokens].tanh()], dim=-1)


class Attention(nn.Module):
    """Products, softmax, masks, a sort."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).split(16, dim=-1)
        scores = torch.bmm(q, k.transpose(1, 2)).masked_fill(torch.ones(6, 6).triu(1).bool(), -9.0)
        best, chosen = scores.topk(4, dim=-1)
        top = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))
        return x + torch.einsum("btk,bkd->btd", top, v)


class Mix(nn.Module):
    """In-place operations and views, several outputs, custom operators and functions, drawing, half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.3)
        self.batch = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.up(x), inplace=True).clone()
        h[:, 0].mul_(0.5)
        cubed, wave = Cube.apply(h * 0.1)  # type: ignore[no-untyped-call]
        h = self.drop(cubed + wave)
        h = torch.ops.bitcheck_op_faults.rescale(h.detach(), 0.01) + h
        kept = h.detach().clone()
        torch.ops.bitcheck_op_faults.shift_(kept[:, 1:3], torch.ones(2, 32))
        spread, middle = torch.var_mean(h, dim=-1, keepdim=True)
        h = self.down((h - middle) * torch.rsqrt(spread + 1e-5) + kept.cumsum(1) * 1e-3)
        h = h.to(torch.bfloat16).mul(1.25).float()
        normed: torch.Tensor = self.batch(h.transpose(1, 2))
        return normed.transpose(1, 2) + x


class Model(nn.Module):
    """All of them, one recomputed in backward, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention, self.mix = Table(), Attention(), Mix()
        self.conv = nn.Conv1d(16, 8, 3, padding=1)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.attention, self.table(tokens), use_reentrant=False)
        x = functional.gelu(self.conv(self.mix(x).transpose(1, 2)))
        logits: torch.Tensor = self.head(functional.max_pool1d(x, 2).transpose(1, 2))
        return logits


def record(fault: Fault | None = None, is_armed: bool = False) -> list[StepRecord]:
    """Train for three steps and return what was recorded."""
    torch.manual_seed(7)
    model = Model()
    muon = torch.optim.SGD([*model.table.parameters(), *model.conv.parameters()], lr=0.05, momentum=0.9, nesterov=True)
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith(("table", "conv"))]
    adam = torch.optim.AdamW(rest, lr=0.01, foreach=False)
    memory = MemoryStore()
    recorder = Recorder(lambda: memory, level=Level.OP)
    injector = Injector(fault, is_armed)
    with injector:
        recorder.start(model)
        try:
            for _ in range(STEPS):
                tokens, targets = torch.randint(0, 16, (2, 6)), torch.randint(0, 16, (2, 3))
                loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), label_smoothing=0.1)
                muon.zero_grad()
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                muon.step()
                adam.step()
        finally:
            recorder.stop()
    if is_armed and not injector.is_done:
        raise RuntimeError(f"the fault was not planted: {fault}")
    return memory.records


@dataclass(frozen=True)
class Fault:
    """One bit of one result of one call of an operator."""

    op: str
    call: int
    """So many calls of the operator, in all steps, come before it."""
    slot: str
    """Which result: `out`, `out.1`, `self.written`."""
    place: int
    """0, 1 or 2: the first, the middle or the last element."""
    site: str
    phase: str
    module: str


class Injector(UnseenMode):
    """Lies below the recorder: changes a bit of a result before the recorder sees it."""

    def __init__(self, fault: Fault | None, is_armed: bool) -> None:
        super().__init__()
        self._fault, self._is_armed = fault, is_armed
        self._calls: Counter[str] = Counter()
        self.is_done = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        facts = facts_of(func)
        if self._fault is None or facts.name != self._fault.op or is_quiet():
            return result
        if self._calls[facts.name] == self._fault.call and self._is_armed:
            for slot, tensor in results(facts, args, kwargs, result):
                if slot == self._fault.slot:
                    flip(tensor, self._fault.place)
                    self.is_done = True
        self._calls[facts.name] += 1
        return result


def results(facts: OpFacts, args: Any, kwargs: Any, result: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, tensor) of what an operation wrote and gave, as the recorder names them."""
    written = [
        (f"{name}.written", value)
        for name, value in named_arguments(facts, args, kwargs)
        if isinstance(value, torch.Tensor) and name.partition(".")[0] in facts.written
    ]
    return [*written, *named_tensors(result, "out")]


def flip(tensor: torch.Tensor, place: int) -> None:
    """Change the lowest bit of the first, the middle or the last element."""
    index = (0, tensor.numel() // 2, tensor.numel() - 1)[place]
    at = []
    for size in reversed(tensor.shape):
        at.append(index % size)
        index //= size
    offset = tensor.storage_offset() + sum(i * stride for i, stride in zip(reversed(at), tensor.stride(), strict=True))
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    flat[offset * tensor.element_size()] ^= 1


def list_faults(records: list[StepRecord]) -> list[Fault]:
    """Return a fault for each kind of operation, phase and result: the last call of it in the faulty step."""
    calls: Counter[str] = Counter()
    chosen: dict[tuple[str, ...], Fault] = {}
    for step in records:
        members: dict[int, list[int]] = {}
        for index, event in enumerate(step.events):
            if event.group >= 0 and step.groups[event.group].kind == "op":
                members.setdefault(event.group, []).append(index)
        for number, group in enumerate(step.groups):
            if group.kind != "op":
                continue
            op = group.op.partition(" in ")[0]
            call, calls[op] = calls[op], calls[op] + 1
            for index in members.get(number, []) if step.step == FAULTY_STEP else ():
                event = step.events[index]
                slot = event.site.slot.removeprefix(op + ".")
                if not event.num_bytes or not (slot == "out" or slot.startswith("out.") or slot.endswith(".written")):
                    continue
                place = len(chosen) % 3
                site = event.site.text(False)
                phase = str(event.site.phase)
                chosen[op, phase, slot] = Fault(op, call, slot, place, site, phase, group.path or group.root)
    return list(chosen.values())


def pick(faults: list[Fault], count: int) -> list[Fault]:
    """Return `count` faults, the phases in turn: of each phase every operator once before any comes again."""
    seen: Counter[tuple[str, str]] = Counter()
    queues: dict[str, list[tuple[int, Fault]]] = {}
    for fault in faults:
        key = fault.phase, fault.op.rpartition(".")[0]
        queues.setdefault(fault.phase, []).append((seen[key], fault))
        seen[key] += 1
    turns: list[tuple[int, int, Fault]] = []
    for queue in queues.values():
        ordered = sorted(queue, key=lambda pair: pair[0])
        turns += [(turn, len(turns), fault) for turn, (_, fault) in enumerate(ordered)]
    return [fault for _, _, fault in sorted(turns, key=lambda entry: entry[:2])[:count]]


def as_run(records: list[StepRecord]) -> MemoryRun:
    """Return the recorded steps as a run."""
    return MemoryRun({0: records}, level=Level.OP, status="complete", environment={}, info={"digest_version": 1})


def judge(fault: Fault, answer: Answer) -> str:
    """Return `right`, or what is wrong with the answer."""
    sites = [origin.site for origin in answer.origins]
    if fault.site not in sites:
        return f"missed: {', '.join(sites[:3]) or 'no origin'}"
    others = [site for site in sites if site != fault.site]
    if others:
        return f"false: {', '.join(others[:3])}"
    return "right"


def main(arguments: list[str] | None = None) -> int:
    """Plant every fault, print a table; exit status 1 where one was not right."""
    parser = argparse.ArgumentParser(description="Planted faults at level op: is the operation named?")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    parser.add_argument("--only", default="", help="faults whose site has this in it")
    parser.add_argument("--count", type=int, default=WANTED, help=f"number of faults ({WANTED}); 0 for all")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    clean = record()
    faults = list_faults(clean)
    faults = pick(faults, options.count or len(faults))
    baseline = as_run(clean)
    rows, begin = [], time.monotonic()
    for number, fault in enumerate(faults, 1):
        if options.only not in fault.site:
            continue
        verdict = judge(fault, diff_runs(baseline, as_run(record(fault, is_armed=True))))
        twin = diff_runs(baseline, as_run(record(fault))).verdict
        rows.append(asdict(fault) | {"verdict": verdict, "twin": str(twin)})
        print(f"{number:3}  {verdict:8.60}  {twin}  {fault.site}", flush=True)
    right = sum(row["verdict"] == "right" for row in rows)
    missed = sum(str(row["verdict"]).startswith("missed") for row in rows)
    false = sum(str(row["verdict"]).startswith("false") for row in rows)
    twins = sum(row["twin"] == "identical" for row in rows)
    print(
        f"{len(rows)} faults: {right} right, {missed} missed, {false} with a false origin; "
        f"{twins} of {len(rows)} twins identical; {time.monotonic() - begin:.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if right == twins == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
