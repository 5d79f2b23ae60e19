"""Which word a cause has, and what is advised about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitcheck.answer import Cause, Origin
from bitcheck.attribution import attribute_step
from bitcheck.causes import describe_step_origins
from bitcheck.events import Level, Phase
from bitcheck.naming import Naming
from bitcheck.remedies import REMEDIES, find_remedy
from tests.bitcheck.test_attribution import Step


def origins_of(*steps: Step, has_gap: bool = False) -> list[Origin]:
    pairs = {rank: step.pair(rank) for rank, step in enumerate(steps)}
    naming = Naming()
    for pair in pairs.values():
        naming.learn(pair.baseline)
    blames = attribute_step(pairs).blames
    return describe_step_origins(blames, pairs, 5, naming, world_size=len(steps), has_gap=has_gap)


def operation(site: str, *, where: str, op: str, sources: tuple[str, ...] = ()) -> Step:
    step = Step().add("forward/mix:out")
    return step.add(site, "other", group=step.group("op", where, op), inputs=sources)


@pytest.mark.parametrize(
    ("site", "where", "op", "cause"),
    [
        ("forward/mix:aten.mm.default.out", "mix", "aten.mm.default", Cause.FORWARD),
        ("backward/mix:aten.mm.default.out", "mix", "aten.mm.default in MmBackward0", Cause.BACKWARD),
        ("forward/mix:aten.mean.dim.self", "mix", "aten.mean.dim", Cause.FORWARD),
        ("forward/mix:aten.full.default.scalars", "mix", "aten.full.default", Cause.DATA),
        ("forward/program:aten.stack.default.tensors.0", "program", "aten.stack.default", Cause.DATA),
        ("forward/program:aten.stack.default.out", "program", "aten.stack.default", Cause.FORWARD),
        ("batch/program:aten.nll_loss_forward.default.target", "program", "aten.nll_loss_forward.default", Cause.DATA),
        ("grad/program:aten.mul_.Tensor.self.written", "program", "aten.mul_.Tensor", Cause.BACKWARD),
        ("optim/:aten.addcdiv_.default.self.written", "", "aten.addcdiv_.default", Cause.OPTIMIZER),
        ("optim/:aten.addcdiv_.default.scalars", "", "aten.addcdiv_.default", Cause.HYPERPARAMETER),
    ],
)
def test_an_operation_has_the_cause_of_what_differs_about_it(site: str, where: str, op: str, cause: Cause) -> None:
    origins = origins_of(operation(site, where=where, op=op, sources=("forward/mix:out",)))
    assert [(origin.cause, origin.op) for origin in origins] == [(cause, op)]


def test_an_argument_that_no_recorded_operation_changed_is_remarked() -> None:
    read = origins_of(operation("forward/mix:aten.mean.dim.self", where="mix", op="aten.mean.dim"))[0]
    wrote = origins_of(operation("forward/mix:aten.mean.dim.out", where="mix", op="aten.mean.dim"))[0]
    assert "torch.empty" in read.remarks[0]
    assert wrote.remarks == ()
    assert "The operation is not at fault" in find_remedy(Cause.FORWARD, [read], Level.OP)
    assert "The operation is not at fault" not in find_remedy(Cause.FORWARD, [wrote], Level.OP)


@pytest.mark.parametrize(
    ("site", "cause", "with_gap"),
    [
        ("forward/mix:out", Cause.FORWARD, Cause.COMPUTE),
        ("param/mix.weight:value", Cause.OPTIMIZER, Cause.COMPUTE),
        ("batch/:in.0", Cause.DATA, Cause.DATA),
        ("scalar/0:lr", Cause.HYPERPARAMETER, Cause.HYPERPARAMETER),
    ],
)
def test_after_unrecorded_steps_no_computation_is_accused(site: str, cause: Cause, with_gap: Cause) -> None:
    step = Step().add(site, "other")
    assert [origin.cause for origin in origins_of(step)] == [cause]
    assert [origin.cause for origin in origins_of(step, has_gap=True)] == [with_gap]


def origin(cause: Cause, *, phase: str = "forward", op: str | None = None, module: str | None = "blocks.1") -> Origin:
    site = f"{phase}/{module}:out"
    return Origin(3, 0, phase, site, module, op, site, "float32", (4,), None, cause)


@pytest.mark.parametrize("cause", list(Cause))
@pytest.mark.parametrize("level", list(Level))
def test_every_cause_has_advice_that_ends_as_a_sentence(cause: Cause, level: Level) -> None:
    advice = find_remedy(cause, [] if cause is Cause.ENDED_EARLY else [origin(cause)], level)
    assert len(advice) > 40
    assert advice.endswith(".")


def test_a_number_that_differs_is_no_batch() -> None:
    number = replace(origin(Cause.DATA), site="forward/mix:aten.mul.Tensor.scalars#2")
    assert "another number" in find_remedy(Cause.DATA, [number], Level.OP)
    assert "batches" in find_remedy(Cause.DATA, [origin(Cause.DATA)], Level.OP)


def test_gradients_that_change_after_backward_are_looked_for_in_the_program_first() -> None:
    found = find_remedy(Cause.COMPUTE, [origin(Cause.COMPUTE, phase="grad")], Level.MODULE)
    assert "clipping" in found and "--level op" in found
    assert "clipping" not in find_remedy(Cause.COMPUTE, [origin(Cause.COMPUTE, phase="grad")], Level.STATE)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("IndexBackward0", "torch.use_deterministic_algorithms(True)"),
        ("aten.index_put_.default", "torch.use_deterministic_algorithms(True)"),
        ("aten._index_put_impl_.default", "torch.use_deterministic_algorithms(True)"),
        ("EmbeddingBackward0", "torch.use_deterministic_algorithms(True)"),
        ("ScatterAddBackward0", "torch.use_deterministic_algorithms(True)"),
        ("ScaledDotProductFlashAttentionBackward0", "deterministic=True for flash_attn"),
        ("FlashAttnFuncBackward", "deterministic=True for flash_attn"),
        ("ConvolutionBackward0", "cudnn.benchmark = False"),
        ("Dropout", "preserve_rng_state=True"),
        ("AddmmBackward0", "CUBLAS_WORKSPACE_CONFIG"),
        ("aten.mm.default", "CUBLAS_WORKSPACE_CONFIG"),
        ("SplitLinear", "unordered reductions"),
    ],
)
def test_the_advice_is_that_of_the_op(op: str, words: str) -> None:
    assert words in find_remedy(Cause.BACKWARD, [origin(Cause.BACKWARD, phase="backward", op=op)], Level.OP)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("MulBackward0 after IndexBackward0", "in no fixed order"),
        ("AddmmBackward0 after NativeDropoutBackward0", "CUBLAS_WORKSPACE_CONFIG"),
        ("MulBackward0 after SplitBackward", "unordered reductions"),
    ],
)
def test_of_several_nodes_the_nearest_is_advised_on_and_then_those_behind_it(op: str, words: str) -> None:
    advice = find_remedy(Cause.BACKWARD, [origin(Cause.BACKWARD, phase="backward", op=op)], Level.OP)
    assert words in advice and "Dropout" not in advice


@pytest.mark.parametrize(
    ("level", "words"), [(Level.STATE, "--level module"), (Level.MODULE, "--level op"), (Level.OP, None)]
)
def test_a_finer_level_is_advised_as_long_as_there_is_one(level: Level, words: str | None) -> None:
    advice = find_remedy(Cause.FORWARD, [origin(Cause.FORWARD, op="Mix")], level)
    assert ("--level" in advice) == (words is not None)
    assert words is None or words in advice


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("param", "not cast"),
        ("buffer", "buffers"),
        ("optim", "optimizer.state_dict()"),
        ("extra", "tracked extra state"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(phase: str, words: str) -> None:
    lacking = replace(origin(Cause.RESTORE, phase=phase), tensor="ema")
    assert words in find_remedy(Cause.RESTORE, [lacking], Level.STATE)


def test_a_gradient_that_is_none_is_not_a_branch() -> None:
    for slot in ("grad", "grad.values", "grad#1"):
        missing = replace(origin(Cause.STRUCTURE, phase="grad"), site=f"grad/blocks.1.weight:{slot}")
        assert "zero_grad" in find_remedy(Cause.STRUCTURE, [missing], Level.STATE)
    assert "zero_grad" not in find_remedy(Cause.STRUCTURE, [origin(Cause.STRUCTURE)], Level.STATE)


def test_an_operation_on_gradients_that_only_one_run_has_is_another_program() -> None:
    clips = replace(origin(Cause.STRUCTURE, phase="grad"), site="grad/program:aten._foreach_norm.Scalar.self.0")
    advice = find_remedy(Cause.STRUCTURE, [clips], Level.OP)
    assert "The program is not the same in both runs" in advice and "clipping" in advice
    assert "zero_grad" not in advice


def test_data_that_recorded_operations_wrote_is_remarked_and_data_from_outside_is_not() -> None:
    read, op = "forward/program:aten.mul.Tensor.self", "aten.mul.Tensor"
    written = origins_of(operation(read, where="program", op=op, sources=("forward/mix:out",)))[0]
    outside = origins_of(operation(read, where="program", op=op))[0]
    assert written.cause == outside.cause == Cause.DATA
    assert written.remarks and not outside.remarks
    assert "The operation is not at fault" in find_remedy(Cause.DATA, [written], Level.OP)
    assert "order and the content of the batches" in find_remedy(Cause.DATA, [outside], Level.OP)


@pytest.mark.parametrize("cause", [Cause.DATA, Cause.FORWARD, Cause.BACKWARD, Cause.INITIAL_STATE])
def test_where_memory_may_be_unwritten_the_check_for_it_is_named(cause: Cause) -> None:
    advice = find_remedy(cause, [origin(cause)], Level.OP)
    assert "torch.empty" in advice and "`bitcheck scan --poison -- CMD`" in advice
    assert "--poison" not in find_remedy(Cause.HYPERPARAMETER, [origin(Cause.HYPERPARAMETER)], Level.OP)


def test_no_entry_of_the_table_is_hidden_by_those_before_it() -> None:
    """Some origin gets each advice: an entry that none gets is dead."""
    ops = ["Dropout", "IndexBackward0", "FlashAttnFuncBackward", "ConvolutionBackward0", "AddmmBackward0", None]
    phases = [str(phase) for phase in Phase]
    given = {
        find_remedy(cause, [replace(origin(cause, phase=phase, op=op), site=f"{phase}/blocks.1:{slot}")], Level.OP)
        for cause in Cause
        for op in ops
        for phase in phases
        for slot in ("out", "grad", "aten.mul.Tensor.scalars#2")
    }
    for remedy in REMEDIES:
        assert any(text.startswith(remedy.advice) for text in given), remedy.advice
