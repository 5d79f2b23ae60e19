"""Small training programs, one for each thing that a recorder could disturb or lose.

Each is a function of no arguments that trains on the CPU for a few steps and returns what it
trained: everything whose bits a recording must leave alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4


def train_on_ones(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of a model that takes three features, for tests that look at what is around it."""
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclasses.dataclass
class Trained:
    """What a program leaves behind."""

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    printed: list[float] = dataclasses.field(default_factory=list)


Program = Callable[[], Trained]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def mlp(width: int = 24, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(inplace), nn.Dropout(0.1), nn.Linear(width, 3))


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 6, shape: tuple[int, ...] = (8,)) -> Trained:
    printed = []
    for _ in range(STEPS):
        x = torch.randn(batch, *shape)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        printed.append(loss.item())
    return Trained([model], [optimizer], printed)


@program
def plain() -> Trained:
    model = mlp()
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@program
def model_that_dies_with_its_function() -> Trained:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return fit(model, optimizer)


@program
def several_optimizers_in_turn() -> Trained:
    generator, critic = mlp(), nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
    first = torch.optim.Adam(generator.parameters(), lr=1e-2)
    second = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
    for _ in range(STEPS):
        with torch.no_grad():
            fake = generator(torch.randn(6, 8))
        (critic(fake).mean() - critic(torch.randn(6, 3)).mean()).backward()
        second.step()
        second.zero_grad()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.5, 0.5)
        (-critic(generator(torch.randn(6, 8))).mean()).backward()
        first.step()
        first.zero_grad()
        second.zero_grad()
    return Trained([generator, critic], [first, second])


@program
def two_optimizers_that_step_together() -> Trained:
    model = mlp()
    weights = torch.optim.AdamW([p for p in model.parameters() if p.ndim > 1], lr=1e-2)
    biases = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=1e-1)
    for _ in range(STEPS):
        model(torch.randn(6, 8)).square().mean().backward()
        for optimizer in (weights, biases):
            optimizer.step()
            optimizer.zero_grad()
    return Trained([model], [weights, biases])


@program
def parameter_groups_and_schedule() -> Trained:
    model = mlp()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(STEPS):
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


@program
def closure_lbfgs() -> Trained:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for _ in range(STEPS):
        x = torch.randn(16, 8)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return Trained([model], [optimizer])


@program
def gradient_accumulation_and_clipping() -> Trained:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        for _ in range(3):
            (model(torch.randn(6, 8)).square().mean() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


@program
def autocast_and_grad_scaler() -> Trained:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(STEPS + 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(6, 8)).float().square().mean()
        if step == 1:
            loss = loss * float("inf")  # a step that the scaler skips
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return Trained([model], [optimizer], [scaler.get_scale()])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@program
def tied_weights() -> Trained:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens = torch.randint(0, 20, (4, 7))
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.shared, self.out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.shared(torch.tanh(self.shared(self.inp(x)))))


@program
def module_called_twice() -> Trained:
    model = CalledTwice()
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    cache: None = None


class Structured(nn.Module):
    class Split(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
            return {"left": x * scale, "right": (x[:, :4], None)}

    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            return None

    def __init__(self) -> None:
        super().__init__()
        self.split, self.nothing = self.Split(), self.Nothing()
        self.left, self.right = nn.Linear(8, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, options: dict[str, torch.Tensor]) -> Output:
        parts = self.split(x, scale=options["scale"])
        self.nothing(x)
        hidden = [self.left(parts["left"]), self.right(parts["right"][0])]
        return Output(hidden[0] + hidden[1], hidden)


@program
def outputs_of_every_form() -> Trained:
    model = Structured()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        output = model(torch.randn(6, 8), {"scale": torch.tensor(0.5)})
        (output.logits.square().mean() + output.hidden[1].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


@program
def in_place_activations() -> Trained:
    model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(True), nn.Flatten(), nn.Linear(36, 3))
    return fit(model, torch.optim.SGD(model.parameters(), lr=1e-2), shape=(2, 8))


@program
def in_place_activation_on_a_view() -> Trained:
    model = mlp(inplace=True)
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shape=(5, 8))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 10, num_layers=2, dropout=0.1, batch_first=True)
        self.out = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(hidden)


@program
def packed_sequences() -> Trained:
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        model(torch.randn(4, 7, 8), torch.tensor([3, 7, 2, 5])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 3)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inp(x)
        return self.out(hidden + checkpoint(self.block, hidden, use_reentrant=self.use_reentrant))


@program
def activation_checkpointing() -> Trained:
    model = Checkpointed(use_reentrant=False)
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@program
def reentrant_checkpointing() -> Trained:
    model = Checkpointed(use_reentrant=True)
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def compiled(backend: str, how: str) -> Trained:
    torch._dynamo.reset()
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16)), nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if how == "wrapped":
        trained = fit(torch.compile(model, backend=backend), optimizer)
        return Trained([model], trained.optimizers, trained.printed)
    if how == "in place":
        model.compile(backend=backend)
    else:
        model[1].compile(backend=backend)
    return fit(model, optimizer)


@program
def compiled_eager() -> Trained:
    return compiled("eager", "wrapped")


@program
def compiled_in_place() -> Trained:
    return compiled("eager", "in place")


@program
def compiled_inductor() -> Trained:
    return compiled("inductor", "wrapped")


@program
def compiled_block_inductor() -> Trained:
    return compiled("inductor", "block")


@program
def sparse_gradients() -> Trained:
    model = nn.Sequential(nn.Embedding(30, 8, sparse=True), nn.Flatten(), nn.Linear(32, 3))
    sparse = torch.optim.SparseAdam(list(model[0].parameters()), lr=1e-2)
    dense = torch.optim.Adam(model[2].parameters(), lr=1e-2)
    for _ in range(STEPS):
        model(torch.randint(0, 30, (6, 4))).square().mean().backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    return Trained([model], [sparse, dense])


class OddBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("phase", torch.polar(torch.ones(8), torch.linspace(0, 3, 8)))
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.phase = self.phase * self.phase[1]
        return self.out(torch.view_as_real(x * self.phase).sum(-1) * self.mask)


@program
def complex_and_integer_buffers() -> Trained:
    model = OddBuffers()
    return fit(model, torch.optim.Adagrad(model.parameters(), lr=1e-2))


@program
def parameters_frozen_and_added() -> Trained:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        if step == 1:
            model[0].weight.requires_grad_(False)
        if step == 2:
            model[0].weight.requires_grad_(True)
            model.append(nn.Linear(3, 2))
            optimizer.add_param_group({"params": model[-1].parameters(), "lr": 1e-3})
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


@program
def evaluation_between_steps() -> Trained:
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 3))
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda mean, new, _: 0.9 * mean + 0.1 * new)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    printed = []
    for step in range(STEPS):
        model.train()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if step % 2:
            model.eval()
            with torch.no_grad():
                printed += [model(torch.ones(2, 8)).sum().item(), average(torch.ones(2, 8)).sum().item()]
    return Trained([model, average], [optimizer], printed)


@program
def loader_with_workers() -> Trained:
    data = TensorDataset(torch.randn(16, 8))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="fork")
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


@program
def optimizer_in_backward() -> Trained:
    model = mlp()
    optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
    for _ in range(STEPS):
        model(torch.randn(6, 8)).square().mean().backward()
    for handle in handles:  # or parameters and optimizers hold each other for good
        handle.remove()
    return Trained([model], list(optimizers.values()))


@program
def gradient_penalty() -> Trained:
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x = torch.randn(6, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


@program
def lazy_modules() -> Trained:
    model = nn.Sequential(nn.LazyLinear(12), nn.ReLU(), nn.LazyLinear(3))
    model(torch.randn(2, 8))
    return fit(model, torch.optim.Adam(model.parameters(), lr=1e-2))


@program
def bare_parameters() -> Trained:
    holder = nn.Linear(8, 3)
    scale, shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([*holder.parameters(), scale, shift], lr=1e-2)
    for _ in range(STEPS):
        (holder(torch.randn(6, 8)) * scale + shift).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([holder, nn.ParameterList([scale, shift])], [optimizer])


@program
def multihead_attention() -> Trained:
    model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shape=(5, 16))


@program
def torchscript() -> Trained:
    model = torch.jit.script(mlp())
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@program
def function_transforms() -> Trained:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    printed = []
    for _ in range(STEPS):
        parameters = dict(model.named_parameters())
        x = torch.randn(6, 8)
        slopes = torch.func.grad(lambda p, x=x: torch.func.functional_call(model, p, (x,)).square().sum())(parameters)
        printed.append(slopes["bias"].sum().item())
        printed.append(torch.func.vmap(model)(torch.randn(2, 6, 8)).sum().item())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer], printed)
