"""What to do about a divergence: a concrete next step for each cause, finer where the op is known.

Place in the flow: diff -> *remedies* -> answer. The first entry that fits is said,
so those for an op come before those for a phase, and those before the ones for a cause alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bitcheck.answer import Cause, Origin
from bitcheck.events import Level
from bitcheck.roles import AFTER, LOCAL_GRADIENT_SLOTS, NUMBERS, is_given_by_program

COMPUTED = frozenset({Cause.FORWARD, Cause.BACKWARD, Cause.COMPUTE, Cause.OPTIMIZER})


@dataclass(frozen=True, slots=True)
class Remedy:
    """Advice for origins of some causes, phases, ops and sites."""

    causes: frozenset[Cause]
    advice: str
    op: str = ""
    """Regular expression, found anywhere in the op's or the module's name, ignoring case."""
    phase: str = ""
    site: str = ""
    """Regular expression, found anywhere in the site."""

    def fits(self, cause: Cause, origin: Origin | None) -> bool:
        """Whether the advice is for this origin."""
        if cause not in self.causes:
            return False
        if not (self.op or self.phase or self.site):
            return True
        if origin is None:
            return False
        names = f"{origin.op or ''} {origin.module or ''}"
        return (
            (not self.op or re.search(self.op, names, re.IGNORECASE) is not None)
            and (not self.phase or origin.phase == self.phase)
            and (not self.site or re.search(self.site, origin.site) is not None)
        )


def _only(*causes: Cause) -> frozenset[Cause]:
    return frozenset(causes)


DETERMINISTIC = (
    "Call torch.use_deterministic_algorithms(True) before training (on CUDA also set CUBLAS_WORKSPACE_CONFIG=:4096:8)"
)
POISON = "`bitcheck scan --poison -- CMD` names what computes from it"

REMEDIES: tuple[Remedy, ...] = (
    Remedy(
        _only(Cause.FORWARD),
        "Recompute under the random state and the buffers of the forward pass: "
        "checkpoint(..., preserve_rng_state=True), and no buffer that the module itself changes.",
        phase="recompute",
    ),
    Remedy(
        COMPUTED,
        "Dropout drew another mask from equal generator states: give it a seeded generator, and leave the random "
        "state as it was when recomputing (checkpoint(..., preserve_rng_state=True)).",
        op=r"dropout",
    ),
    Remedy(
        COMPUTED,
        f"{DETERMINISTIC}: the op adds into the same elements from several threads in no fixed order.",
        op=r"index_?put|indexbackward|index_?add|index_?copy|embedding|scatter|gather|bincount|histc|cumsum|"
        r"put_|take|max_?unpool|upsample|interpolate|grid_?sampl|replication_?pad|reflection_?pad|adaptive_?avg|"
        r"adaptive_?max|fractional_?max|ctc_?loss|nll_?loss2d|kthvalue|median",
    ),
    Remedy(
        COMPUTED,
        "Use a deterministic attention backward: torch.use_deterministic_algorithms(True) for PyTorch's own, "
        "deterministic=True for flash_attn, or the math backend "
        "(torch.nn.attention.sdpa_kernel(SDPBackend.MATH)).",
        op=r"flash|scaled_dot_product|efficient_?attention|sdpa",
    ),
    Remedy(
        COMPUTED,
        f"{DETERMINISTIC}, and torch.backends.cudnn.benchmark = False: cuDNN picks its algorithm by a timing.",
        op=r"conv|cudnn",
    ),
    Remedy(
        COMPUTED,
        "Keep the way in which the matrix product is split the same in both runs: the same thread count "
        "(OMP_NUM_THREADS, torch.set_num_threads), the same batch shapes, on CUDA CUBLAS_WORKSPACE_CONFIG=:4096:8 and "
        "one stream.",
        op=r"\b(aten[.:]+)?(addmm|mm|bmm|baddbmm|matmul|linear)(backward\d*)?\b",
    ),
    Remedy(
        _only(Cause.FORWARD),
        "Look at what writes the buffer in forward: an order-dependent reduction, a random draw, uninitialised "
        f"memory ({POISON}), or another formula with equal values and other bits.",
        phase="buffer",
    ),
    Remedy(
        _only(Cause.FORWARD),
        "Compare the targets and whatever else enters the loss by hand, or record at --level op, which sees them; "
        f"then look for uninitialised memory (torch.empty; {POISON}), unseeded draws and unordered reductions in the "
        "forward pass.",
        phase="loss",
    ),
    Remedy(
        _only(Cause.DATA),
        "The program gives this operation another number: find what makes it at the line that asks for the operation "
        "(--stacks): an argument of the command, a configuration, a count, or what was read from a tensor (.item()).",
        site=NUMBERS,
    ),
    Remedy(
        _only(Cause.DATA),
        "Make the order and the content of the batches a function of the seed and the step alone: sort file lists "
        "(os.listdir, set and glob have no fixed order; PYTHONHASHSEED changes a set's), seed the sampler's "
        "generator and the workers (generator=, worker_init_fn=), and save the sampler's generator and position in "
        "the checkpoint. A tensor that the program makes itself, and does not read, may hold memory that was never "
        f"written (torch.empty), which looks the same: {POISON}.",
    ),
    Remedy(
        _only(Cause.RNG),
        "Seed this generator at the start, save its state in the checkpoint and restore it on resume, and keep "
        "whatever only one run draws (logging, previews, extra evaluations) on a generator of its own, or put the "
        "state back afterwards.",
    ),
    Remedy(
        _only(Cause.INITIAL_STATE),
        "Seed before the model is built (torch.manual_seed, and python's and numpy's generators where they are used), "
        "build on one device and in one order, and load the same weights.",
    ),
    Remedy(
        _only(Cause.COLLECTIVE),
        "Keep the order in which ranks are added the same: one algorithm and topology in both runs (NCCL_ALGO, "
        "NCCL_PROTO, equal placement of ranks on nodes), equal buckets, or an ordered reduction of your own.",
    ),
    Remedy(
        _only(Cause.OPTIMIZER),
        "Use one implementation of the optimizer in both runs (foreach=, fused=, capturable= equal), and look for "
        "hidden state: an update from a side stream, an uninitialised buffer, an average or a clip that only one "
        "run does.",
    ),
    Remedy(
        _only(Cause.HYPERPARAMETER),
        "Give both runs the same value: compare their commands and configurations; where one was resumed, save the "
        "scheduler (lr_scheduler.state_dict()) and whatever counts its steps in the checkpoint, and restore them "
        "after the optimizer.",
    ),
    Remedy(
        _only(Cause.STRUCTURE),
        "None and zero are not the same to an optimizer: use zero_grad(set_to_none=...) alike in both runs, and make "
        "the same parameters take part.",
        phase="grad",
        site=rf":(?:{'|'.join(map(re.escape, sorted(LOCAL_GRADIENT_SLOTS)))})(?:[#@]|$)",
    ),
    Remedy(
        _only(Cause.STRUCTURE),
        "The program is not the same in both runs: compare their code, commands and configurations (clipping, say, "
        "that only one of them does), or find the branch that makes only one run do this (a condition on time, rank, "
        "a file or a random number), and make it depend on the step alone.",
    ),
    Remedy(
        _only(Cause.ENDED_EARLY),
        "See why the run stopped (its own log, out of memory, a signal) and record it again; `--until N` compares "
        "the finished steps only.",
    ),
)


UNWRITTEN = (
    "memory that was never written (torch.empty in a buffer or a parameter, filled late or not at all), which no seed "
    f"changes: {POISON}"
)
_RESUMED = (
    "If one of the runs was resumed from a checkpoint, record it with --start-step N: then it is compared with the "
    "other's state at that step."
)


def start_advice(origins: Sequence[Origin], generators: Mapping[str, bool]) -> str:
    """Return what to do about fresh runs that start from different states.

    `generators`: of those that were read in the first step, whether both runs had the same state. Where PyTorch's
    own have, seeds are not what differs, but for a seed set after the model was built.
    """
    of_torch = [agrees for name, agrees in generators.items() if name.startswith("torch.")]
    others = sorted(name for name, agrees in generators.items() if not agrees)
    if of_torch and all(of_torch):
        drawn = f" or from {' or '.join(others)} (whose states differ: seed those too)" if others else ""
        advice = (
            "PyTorch's generators have the same states in both runs, so its seeds are most likely the same and do not "
            "help. Look for other weights loaded, another order of building, values drawn before the seed was set"
            f"{drawn}, and for {UNWRITTEN}."
        )
    else:
        table = next(remedy.advice for remedy in REMEDIES if Cause.INITIAL_STATE in remedy.causes)
        advice = f"{table} Where only single tensors differ, look for {UNWRITTEN}."
    entering = []
    for origin in origins:
        if origin.cause is Cause.HYPERPARAMETER:
            entering.append(f"the same {origin.tensor}")
        elif origin.cause is Cause.DATA:
            entering.append("the same batches in the same order")
    also = f" Give both runs {' and '.join(dict.fromkeys(entering))}." if entering else ""
    return f"{advice}{also} {_RESUMED}"


def restore_advice(origins: Sequence[Origin]) -> str:
    """Return which entries a checkpoint lacks, for tensors that were not restored as they were."""
    phases = {origin.phase for origin in origins}
    keys = []
    if "param" in phases:
        keys.append("the parameters in the dtype they are trained in (model.state_dict(), not cast)")
    if "buffer" in phases:
        keys.append("the model's buffers (model.state_dict() whole; persistent=False leaves one out)")
    if "optim" in phases:
        keys.append("the optimizer's state (optimizer.state_dict())")
    if "extra" in phases:
        keys.append(
            "the tracked extra state (" + ", ".join(sorted({o.tensor for o in origins if o.phase == "extra"})[:5]) + ")"
        )
    if "scalar" in phases:
        keys.append("the scheduler (lr_scheduler.state_dict()) and whatever counts its steps, after the optimizer")
    if "rng" in phases:
        names = sorted({origin.tensor.partition(":")[0] for origin in origins if origin.phase == "rng"})
        keys.append(f"the state of the generators ({', '.join(names)})")
    if "batch" in phases:
        keys.append("the sampler's generator and position")
    return f"Save in the checkpoint, and load before the first step: {'; '.join(keys)}."


FINER = {
    Level.STATE: "Record both runs at --level module to see the module in which it begins.",
    Level.MODULE: "Record both runs at --level op to see the operation.",
}


_WRITES = re.compile(r"\.written(?:[#@]|$)")
"""Sites of what an operation was given to write into."""
READ_ADVICE = (
    "The operation is not at fault, what it was given is: look in the code around it for an order that is drawn or "
    f"depends on a set or on time, for memory that is read before it is written (torch.empty; {POISON}), for hooks on "
    "tensors (register_hook), and for kernels that PyTorch does not dispatch."
)
REBUILT_BUCKETS = (
    "Where DistributedDataParallel reduces: in both runs, either build it with find_unused_parameters=True, which "
    "never rebuilds the buckets, or do one forward and backward pass on it before the checkpoint is loaded, so that "
    "they are rebuilt before the first step."
)


def find_remedy(
    cause: Cause,
    origins: Sequence[Origin],
    level: Level,
    *,
    is_rebuild: bool = False,
    generators: Mapping[str, bool] | None = None,
) -> str:
    """Return what to do about a divergence, in sentences.

    `is_rebuild`: it is where DistributedDataParallel, restarted, has not rebuilt its buckets yet.
    `generators`: as `start_advice` takes them.
    """
    first = origins[0] if origins else None
    if is_rebuild:
        return REBUILT_BUCKETS
    if cause is Cause.RESTORE:
        return restore_advice(origins)
    if cause is Cause.INITIAL_STATE:
        return start_advice(origins, generators or {})
    if first is not None and first.remarks:
        return READ_ADVICE
    advice = _advice(cause, first)
    if cause is Cause.COMPUTE and not advice and level is Level.MODULE and first is not None and first.phase == "grad":
        advice = (
            "Compare what the two programs do with gradients between the backward pass and the optimizer's step: "
            "clipping, a gradient scaler, a hook, a sum over ranks of their own. Where they do the same, call "
            "torch.use_deterministic_algorithms(True), and see whether it goes away."
        )
    if cause is Cause.COMPUTE and not advice:
        advice = f"{DETERMINISTIC} and see whether it goes away."
    if first is not None and not advice and is_given_by_program(first.phase, first.op):
        advice = (
            "Look at what the program computes from the modules before and hands to this one, and where it takes other "
            "numbers from: unseeded draws, unordered reductions, memory that was never written (torch.empty; "
            f"{POISON})."
        )
    if cause in (Cause.FORWARD, Cause.BACKWARD) and not advice:
        hooks = ", hooks that change a gradient (register_hook)" if cause is Cause.BACKWARD else ""
        advice = (
            f"{DETERMINISTIC}; look in this module for unordered reductions, uninitialised memory (torch.empty; "
            f"{POISON}){hooks} and draws from generators that no seed reaches."
        )
    writes = first is not None and _WRITES.search(first.site) is not None
    if cause in (Cause.FORWARD, Cause.BACKWARD) and writes and POISON not in advice:
        advice = f"{advice} What it leaves as it was may be memory that was never written (torch.empty): {POISON}."
    finer = FINER.get(level)
    if cause in COMPUTED and finer and finer.split(" to ")[0] not in advice and "--level" not in advice:
        advice = f"{advice} {finer}"
    return advice


def _advice(cause: Cause, origin: Origin | None) -> str:
    """Return the first advice that fits, "" where none does: for the nearest of several nodes, else for any."""
    nearest = origin
    if origin is not None and origin.op is not None:
        nearest = replace(origin, op=origin.op.partition(AFTER)[0])
    fitting = [remedy for remedy in REMEDIES if remedy.fits(cause, nearest)]
    if not (fitting and fitting[0].op):
        fitting = [*(remedy for remedy in REMEDIES if remedy.op and remedy.fits(cause, origin)), *fitting]
    return fitting[0].advice if fitting else ""


@dataclass(frozen=True, slots=True)
class Switch:
    """What makes an operation give the same bits each time."""

    op: str
    """Regular expression, found anywhere in the operator's name."""
    is_covered: bool
    """Whether torch.use_deterministic_algorithms(True) changes it (or raises, where there is no other way)."""
    advice: str
    raises: bool = False
    """Whether that switch has no deterministic form of it and raises an error."""


_WORKS = f"{DETERMINISTIC}: it then takes an ordered form of this operation."
_RAISES = (
    "torch.use_deterministic_algorithms(True) raises an error here on CUDA, because there is no ordered form: "
    "write it with other operations (a sort and a segmented sum, a matrix product with one-hot rows), or run it on the "
    "CPU with one thread."
)

SWITCHES: tuple[Switch, ...] = (
    Switch(
        r"aten\._?index_put",
        True,
        f"{DETERMINISTIC}: without it the threads add in the order in which they come, on the CPU too.",
    ),
    Switch(r"aten\.(index_add|index_copy|index_reduce)", True, _WORKS),
    Switch(r"aten\.(scatter_add|scatter|scatter_reduce|gather)", True, _WORKS),
    Switch(r"aten\.put_", True, _WORKS),
    Switch(r"aten\.(embedding_dense_backward|index_select_backward|repeat_interleave)", True, _WORKS),
    Switch(r"aten\.(replication_pad\dd_backward|reflection_pad1d_backward)", True, _WORKS),
    Switch(r"aten\._?(cudnn_)?convolution|aten\.conv\dd", True,
           f"{DETERMINISTIC}, and torch.backends.cudnn.benchmark = False: cuDNN picks its algorithm by a timing."),
    Switch(r"aten\._?(baddbmm|addmm|bmm|mm|addmv|mv|dot|linear)\b", False,
           "Not covered by the switch alone: set CUBLAS_WORKSPACE_CONFIG=:4096:8 before CUDA starts and use one "
           "stream; on the CPU keep the number of threads."),
    Switch(r"aten\.(max_unpool|adaptive_max_pool|adaptive_avg_pool|fractional_max_pool|max_pool3d_with_indices_backward|"
           r"avg_pool3d_backward|upsample_\w+_backward|grid_sampler_\dd_backward|reflection_pad[23]d_backward|"
           r"nll_loss2d|cumsum|ctc_loss|_ctc_loss|histc|bincount|kthvalue|median|_embedding_bag)", True, _RAISES, True),
    Switch(r"flash_attention|efficient_attention|scaled_dot_product", True,
           "Use a deterministic attention backward: torch.use_deterministic_algorithms(True) for PyTorch's own, or the "
           "math backend (torch.nn.attention.sdpa_kernel(SDPBackend.MATH))."),
    Switch(r"^flash_attn", False, "Not covered: pass deterministic=True to flash_attn."),
    Switch(r"aten\._?(nan_)?(sum|mean|norm|linalg_vector_norm|var|std|prod)\b", False,
           "Not covered, and fixed in PyTorch for equal shapes, strides and thread counts: look for memory that "
           "another stream or thread writes meanwhile."),
    Switch(r"triton\.", False,
           "Not covered: a kernel of your own. Look for tl.atomic_add, for autotuning that picks another configuration "
           "(another order of addition) each time, and for programs that write the same elements."),
)  # fmt: skip
"""Known operations, by the documentation of torch.use_deterministic_algorithms and by what was measured."""


def find_switch(op: str) -> Switch | None:
    """Return what is known to help an operator that disagrees with itself, None where nothing is."""
    return next((switch for switch in SWITCHES if re.search(switch.op, op)), None)
