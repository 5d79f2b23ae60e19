"""Recording on a CUDA device: neutral, repeatable, and right about kernels that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitcheck
from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.events import Phase, StepKind
from bitcheck.hashing import hash_file
from bitcheck.run import open_run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

WIDTH, HEADS, LENGTH, BATCH, STEPS = 256, 8, 1024, 4, 3


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Scatter(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.zeros(16, x.shape[-1], device=x.device).index_add_(0, index, x)


class AttentionNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attn, self.out = nn.Linear(WIDTH, 3 * WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.norm(self.out(self.attn(q, k, v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)))


class ScatterNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.scatter, self.out = nn.Linear(32, 64), Scatter(), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.out(self.scatter(self.inp(x), index))


def train_attention(folder: Path | None, level: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = AttentionNet().to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def steps(end: Any) -> None:
        for _ in range(STEPS):
            x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            end()

    record_or_not(folder, model, optimizer, level, steps)
    return [tensor.clone() for tensor in (*model.parameters(), torch.cuda.get_rng_state())]


def train_scatter(folder: Path | None, level: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = ScatterNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def steps(end: Any) -> None:
        for _ in range(STEPS):
            x = torch.randn(60_000, 32, device="cuda")
            index = torch.randint(0, 16, (60_000,), device="cuda")
            model(x, index).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            end()

    record_or_not(folder, model, optimizer, level, steps)
    return [tensor.clone() for tensor in model.parameters()]


def record_or_not(folder: Path | None, model: nn.Module, optimizer: Any, level: str, steps: Any) -> None:
    if folder is None:
        steps(lambda: None)
        return
    with bitcheck.record(folder, model, optimizer, level=level) as rec:
        steps(rec.step)


def compare(tmp_path: Path, train: Any, level: str) -> Answer:
    for name in ("a", "b"):
        train(tmp_path / name, level)
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        return diff_runs(baseline, candidate)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("level", ["state", "module", "op"])
@pytest.mark.parametrize("train", [train_attention, train_scatter])
def test_a_deterministic_recipe_repeats_itself_and_recording_leaves_its_bits_alone(
    train: Any, level: str, tmp_path: Path, deterministic: None
) -> None:
    bare = train(None, level)
    answer = compare(tmp_path, train, level)
    assert answer.verdict == "identical", answer.explanation
    assert answer.compared.steps == STEPS
    recorded = train(tmp_path / "c", level)
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(bare, recorded, strict=True))


@pytest.mark.parametrize("level", ["module", "op"])
def test_flash_attentions_backward_is_the_origin(level: str, tmp_path: Path) -> None:
    answer = compare(tmp_path, train_attention, level)
    assert (answer.verdict, str(answer.cause)) == ("diverged", "backward"), answer.explanation
    assert answer.first is not None
    assert answer.first.module == "attn", answer.first
    assert answer.first.op is not None
    assert "attention" in answer.first.op.lower()
    assert {origin.module for origin in answer.origins} == {"attn"}


@pytest.mark.parametrize("level", ["module", "op"])
def test_index_adds_forward_is_the_origin(level: str, tmp_path: Path) -> None:
    answer = compare(tmp_path, train_scatter, level)
    assert (answer.verdict, str(answer.cause)) == ("diverged", "forward"), answer.explanation
    assert answer.first is not None
    assert answer.first.module == "scatter", answer.first
    if level == "op":
        assert answer.first.op is not None
        assert "index_add" in answer.first.op


def test_parameters_digested_on_the_device_equal_the_checkpoint_hashed_on_the_cpu(tmp_path: Path) -> None:
    model = AttentionNet().to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with bitcheck.record(tmp_path / "a", model, optimizer, level="state") as rec:
        model(torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        rec.step()
        torch.save(model.state_dict(), tmp_path / "model.pt")
    with open_run(tmp_path / "a") as run:
        reader = run.rank(0)
        row = int((reader.table["kind"] == int(StepKind.STEP)).argmax())
        step = reader.load(row)
    recorded = {
        site.path: step.digests[index].tobytes().hex()
        for index, site in enumerate(step.sites)
        if site.phase is Phase.PARAM
    }
    hashed = {entry.name: entry.digest.hex() for entry in hash_file(tmp_path / "model.pt").tensors}
    assert recorded == hashed


def test_memory_that_is_freed_and_overwritten_right_after_a_hook_keeps_its_digest(
    tmp_path: Path, deterministic: None
) -> None:
    class Scratch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def train(folder: Path) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), Scratch(), nn.Linear(512, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        side = torch.cuda.Stream()
        with bitcheck.record(folder, model, optimizer) as rec:
            for _ in range(20):
                with torch.no_grad():
                    for _ in range(8):
                        y = model[1](torch.randn(4096, 512, device="cuda"))
                        y.zero_()
                        del y
                        torch.full((4096, 512), 7.0, device="cuda")
                with torch.cuda.stream(side):
                    side.wait_stream(torch.cuda.current_stream())
                    noise = torch.randn(2048, 2048, device="cuda")
                    noise @ noise
                model(torch.randn(64, 512, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                rec.step()
            torch.cuda.current_stream().wait_stream(side)

    train(tmp_path / "a")
    train(tmp_path / "b")
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        answer = diff_runs(baseline, candidate)
    assert answer.verdict == "identical", answer.explanation


# --- programs that the recorder must not disturb, and must see rightly


class Flip(nn.Module):
    """Changes one bit of what passes through, on the device, in the step that is planned."""

    def __init__(self, planned: int | None) -> None:
        super().__init__()
        self.planned, self.step = planned, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        if self.step == self.planned:
            with torch.no_grad():
                y.view(torch.int32)[0, 0] ^= 1
        return y


class SideStream(nn.Module):
    """Computes on a stream of its own, its result ready before anyone reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))
        self.stream = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            y = x @ self.weight
            x.record_stream(self.stream)
        main.wait_stream(self.stream)
        y.record_stream(main)
        return y


def make_inside(kind: str) -> nn.Module:
    inside = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    if kind == "streams":
        return nn.Sequential(inside, SideStream().cuda())
    if kind == "graphed":
        graphed = torch.cuda.make_graphed_callables(inside, (torch.randn(32, 64, device="cuda", requires_grad=True),))
        assert isinstance(graphed, nn.Module)
        return graphed
    if kind == "compiled":
        compiled = torch.compile(inside)
        assert isinstance(compiled, nn.Module)
        return compiled
    compiled = torch.compile(inside, mode="reduce-overhead")
    assert isinstance(compiled, nn.Module)
    return compiled


def train_around(kind: str, folder: Path | None, level: str, planned: int | None = None) -> list[torch.Tensor]:
    """Train a module of `kind` between two others under autocast, scaling and clipping; return what it ends with."""
    torch.manual_seed(0)
    flip = Flip(planned).cuda()
    first, inside, last = nn.Linear(64, 64).cuda(), make_inside(kind), nn.Linear(64, 1).cuda()
    model = nn.ModuleDict({"first": first, "inside": inside, "flip": flip, "last": last})

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts.values():
                x = part(x)
            return x

    whole = Whole()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)

    def steps(end: Any) -> None:
        for number in range(STEPS + 2):
            flip.step = number
            x = torch.randn(32, 64, device="cuda")
            loss = whole(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            end()

    record_or_not(folder, whole, optimizer, level, steps)
    return [tensor.detach().clone() for tensor in (*whole.parameters(), torch.cuda.get_rng_state())]


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("kind", ["streams", "graphed", "compiled", "compiled with graphs"])
def test_streams_graphs_and_compiled_modules_keep_their_bits_and_a_changed_bit_is_found(
    kind: str, level: str, tmp_path: Path, deterministic: None
) -> None:
    bare = train_around(kind, None, level)
    for name in ("a", "b"):
        recorded = train_around(kind, tmp_path / name, level)
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(bare, recorded, strict=True))
    train_around(kind, tmp_path / "c", level, planned=3)
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        answer = diff_runs(baseline, candidate)
    assert answer.verdict == "identical", answer.explanation
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "c") as candidate:
        answer = diff_runs(baseline, candidate)
    expected = "forward" if level == "module" else "structure"  # there the bit is changed by one operation more
    assert (answer.verdict, str(answer.cause)) == ("diverged", expected), answer.explanation
    assert answer.first is not None
    assert answer.first.step == 3
    assert answer.first.module == "parts.flip", answer.first


def test_a_graph_captured_while_recording_is_neither_broken_nor_broken_into(
    tmp_path: Path, deterministic: None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, 64, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with bitcheck.record(tmp_path / "a", model, optimizer) as rec:
        step()
        rec.step()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = model(x)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(captured, model(x))
        step()
        rec.step()
    with open_run(tmp_path / "a") as run:
        reader = run.rank(0)
        missed = [note for row in range(reader.num_rows) for note in reader.load(row).unobserved]
    assert any("CUDA graph is being captured" in note for note in missed), missed
