"""Origins within one step: what each kind of event depends on, edges or none."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from bitcheck.attribution import Attribution, attribute_step
from bitcheck.events import Event, Group, Phase, Site, StepKind, StepRecord
from bitcheck.memory import MemoryStep
from bitcheck.pairing import StepPair
from tests.bitcheck.made_up_runs import digest_of


@dataclass
class Step:
    """Two recordings of a step, event by event: `bits` says whether the candidate's are the baseline's."""

    baseline: StepRecord = field(default_factory=lambda: StepRecord(0, StepKind.STEP))
    candidate: StepRecord = field(default_factory=lambda: StepRecord(0, StepKind.STEP))
    places: list[str] = field(default_factory=list)

    def group(self, kind: str, path: str, op: str = "", parent: int = -1) -> int:
        for record in (self.baseline, self.candidate):
            record.groups.append(Group(kind, "Net", path, op or path, parent))
        return len(self.baseline.groups) - 1

    def add(
        self,
        text: str,
        bits: str = "same",
        *,
        inputs: tuple[str, ...] = (),
        group: int = -1,
        root: str = "Net",
        occurrence: int = 0,
        is_eval: bool = False,
    ) -> Step:
        """Add `phase/path:slot`; `bits` is `same`, `other` or the run that alone has it."""
        phase, _, rest = text.partition("/")
        path, _, slot = rest.rpartition(":")
        site = Site(Phase(phase), "" if phase in ("rng", "loss", "comm") else root, path, slot, occurrence, is_eval)
        known = tuple(self.places.index(name) for name in inputs)
        for record, name in ((self.baseline, "baseline"), (self.candidate, "candidate")):
            if bits in ("same", "other", name):
                word = name if bits == "other" else "same"
                record.events.append(Event(site, "float32", (4,), 16, digest_of(text, word), b"", group, known))
        self.places.append(text)
        return self

    def pair(self, rank: int = 0) -> StepPair:
        return StepPair(rank, MemoryStep(self.baseline), MemoryStep(self.candidate))


def attribute(*steps: Step) -> tuple[Attribution, dict[int, StepPair]]:
    pairs = {rank: step.pair(rank) for rank, step in enumerate(steps)}
    differing = {rank: pair for rank, pair in pairs.items() if pair.parted()}
    return attribute_step(differing), pairs


def blamed(*steps: Step) -> list[str]:
    attribution, pairs = attribute(*steps)
    return [_name(pairs[blame.shown.rank].site(blame.shown.position)) for blame in attribution.blames]


def _name(site: Site) -> str:
    return f"{site.phase}/{site.path}:{site.slot}"


def test_a_collective_that_gives_other_bits_on_equal_contributions_is_one_origin_over_all_ranks() -> None:
    ranks = []
    for _ in range(3):
        step = Step()
        group = step.group("collective", "", "all_reduce(sum)")
        step.add("backward/fc.weight:grad")
        step.add("comm/all_reduce.world:in.0", inputs=("backward/fc.weight:grad",))
        step.add("comm/all_reduce.world:out.0", "other", inputs=("comm/all_reduce.world:in.0",), group=group)
        step.add("grad/fc.weight:grad", "other", inputs=("backward/fc.weight:grad",))
        ranks.append(step.add("param/fc.weight:value", "other"))
    attribution, _ = attribute(*ranks)
    assert blamed(*ranks) == ["comm/all_reduce.world:out.0"]
    assert attribution.blames[0].ranks == [0, 1, 2]
    assert attribution.propagated == 6


def test_a_collective_inherits_from_the_rank_that_contributed_other_bits() -> None:
    ranks = []
    for rank in range(3):
        own = "other" if rank == 1 else "same"
        step = Step()
        group = step.group("collective", "", "all_reduce(sum)")
        step.add("backward/fc.weight:grad", own)
        step.add("comm/all_reduce.world:in.0", own, inputs=("backward/fc.weight:grad",))
        step.add("comm/all_reduce.world:out.0", "other", inputs=("comm/all_reduce.world:in.0",), group=group)
        ranks.append(step.add("grad/fc.weight:grad", "other", inputs=("backward/fc.weight:grad",)))
    attribution, _ = attribute(*ranks)
    assert blamed(*ranks) == ["backward/fc.weight:grad"]
    assert attribution.blames[0].shown.rank == 1


def test_what_a_rank_receives_inherits_from_the_rank_that_sent_it() -> None:
    sender = (
        Step().add("forward/stage.0:out", "other").add("comm/send.0-1:in.0", "other", inputs=("forward/stage.0:out",))
    )
    receiver = Step().add("comm/send.0-1:out.0", "other")
    receiver.add("forward/stage.1:out", "other", inputs=("comm/send.0-1:out.0",))
    attribution, _ = attribute(sender, receiver)
    assert blamed(sender, receiver) == ["forward/stage.0:out"]
    assert attribution.propagated == 3


def test_origins_are_ordered_by_what_happened_before_over_ranks() -> None:
    """Rank 1's own fault comes after the collective to which rank 0 had come late."""
    late = Step()
    for number in range(5):
        late.add(f"forward/a.{number}:out")
    late.add("backward/a:grad_in.0", "other", group=late.group("backward", "a"))
    late.add("comm/barrier.world:in.0").add("comm/barrier.world:out.0", inputs=("comm/barrier.world:in.0",))
    early = Step()
    early.add("comm/barrier.world:in.0").add("comm/barrier.world:out.0", inputs=("comm/barrier.world:in.0",))
    early.add("forward/b:out", "other", group=early.group("forward", "b"))
    assert blamed(late, early) == ["backward/a:grad_in.0", "forward/b:out"]
    assert blamed(early, late) == ["backward/a:grad_in.0", "forward/b:out"]


def test_the_call_around_an_origin_is_not_one_though_its_edges_do_not_say_so() -> None:
    step = Step().add("batch/:in.0")
    outer = step.group("forward", "block")
    inner = step.group("forward", "block.mix", parent=outer)
    step.add("forward/block.mix:out", "other", inputs=("batch/:in.0",), group=inner)
    step.add("forward/block:out", "other", inputs=("batch/:in.0",), group=outer)
    assert blamed(step) == ["forward/block.mix:out"]


def test_a_call_whose_own_code_made_an_argument_is_blamed_beside_another_origin_inside_it() -> None:
    step = Step().add("batch/:in.0")
    outer = step.group("forward", "block")
    inner = step.group("forward", "block.left", parent=outer)
    step.add("forward/block.left:out", "other", inputs=("batch/:in.0",), group=inner)
    step.add("forward/block.right:in.0", "other", inputs=("batch/:in.0",), group=outer)
    step.add("forward/block:out", "other", inputs=("forward/block.left:out", "forward/block.right:in.0"), group=outer)
    assert blamed(step) == ["forward/block.left:out", "forward/block:out"]


def test_a_gradient_inside_a_region_that_was_recomputed_otherwise_is_inherited() -> None:
    step = Step().add("forward/block.drop:in.0").add("forward/block.drop:out", inputs=("forward/block.drop:in.0",))
    region = step.group("recompute", "block")
    drop = step.group("recompute", "block.drop", parent=region)
    step.add("recompute/block.drop:out", "other", inputs=("forward/block.drop:in.0",), group=drop)
    step.add(
        "backward/block.down.weight:grad",
        "other",
        inputs=("forward/block.drop:out",),
        group=step.group("backward", "d"),
    )
    assert blamed(step) == ["recompute/block.drop:out"]


def test_a_gradient_outside_the_recomputed_region_is_an_origin_of_its_own() -> None:
    step = Step().add("forward/head:out")
    step.add("recompute/block:out", "other", inputs=("forward/head:out",), group=step.group("recompute", "block"))
    step.add("backward/head:grad_in.0", "other", inputs=("forward/head:out",), group=step.group("backward", "head"))
    assert blamed(step) == ["recompute/block:out", "backward/head:grad_in.0"]


def test_the_first_gradient_inherits_from_a_loss_whose_target_nobody_saw() -> None:
    step = Step().add("forward/head:out").add("loss/loss:value", "other", inputs=("forward/head:out",))
    step.add("backward/head:grad_out", "other", inputs=("forward/head:out",), group=step.group("backward", "head"))
    assert blamed(step) == ["loss/loss:value"]


def test_several_batches_of_a_step_are_one_origin_per_rank() -> None:
    ranks = [Step().add("batch/:in.0", "other").add("batch/:in.1", "other") for _ in range(2)]
    attribution, _ = attribute(*ranks)
    assert [(blame.shown.rank, len(blame.members)) for blame in attribution.blames] == [(0, 2), (1, 2)]


def test_a_batch_made_from_an_output_that_differs_is_inherited() -> None:
    """The second model of a pair reads what the first one generated."""
    step = Step().add("batch/:in.0")
    step.add("forward/generator:out", "other", inputs=("batch/:in.0",), group=step.group("forward", "generator"))
    step.add("batch/judge:in.0", "other", root="Judge")
    assert blamed(step) == ["forward/generator:out"]


def test_an_evaluation_that_differs_explains_nothing_of_the_training_after_it() -> None:
    step = Step().add("forward/head:out", "other", is_eval=True).add("loss/loss:value", "other")
    assert blamed(step) == ["forward/head:out", "loss/loss:value"]


def test_a_learning_rate_that_follows_an_evaluation_is_inherited() -> None:
    step = Step().add("forward/head:out", "other", is_eval=True).add("scalar/0:lr", "other", root="SGD")
    assert blamed(step) == ["forward/head:out"]


@pytest.mark.parametrize("earlier", ["loss/loss:value", "grad/fc.weight:grad", "scalar/0:lr"])
def test_parameters_inherit_from_what_the_optimizer_had(earlier: str) -> None:
    step = Step().add(earlier, "other").add("param/fc.weight:value", "other").add("optim/fc.weight:exp_avg", "other")
    assert blamed(step) == [earlier]


def test_parameters_and_optimizer_state_that_differ_alone_are_one_origin() -> None:
    step = (
        Step().add("grad/fc.weight:grad").add("param/fc.weight:value", "other").add("optim/fc.weight:exp_avg", "other")
    )
    attribution, _ = attribute(step)
    assert blamed(step) == ["param/fc.weight:value"]
    assert len(attribution.blames[0].members) == 2


def test_a_buffer_whose_module_had_equal_arguments_and_outputs_is_an_origin_beside_another() -> None:
    step = Step().add("forward/norm:in.0").add("forward/norm:out", inputs=("forward/norm:in.0",))
    step.add("forward/head:out", "other", inputs=("forward/norm:out",), group=step.group("forward", "head"))
    step.add("buffer/norm.mean:value", "other").add("buffer/head.count:value", "other")
    assert blamed(step) == ["forward/head:out", "buffer/norm.mean:value"]


def test_a_buffer_derived_from_a_parameter_of_its_module_that_differs_is_no_origin() -> None:
    step = Step().add("forward/norm:in.0").add("forward/norm:out", inputs=("forward/norm:in.0",))
    step.add("param/head.weight:value", "other").add("param/norm.weight:value")
    step.add("buffer/norm.codes:value", "other").add("buffer/head.codes:value", "other")
    assert blamed(step) == ["param/head.weight:value", "buffer/norm.codes:value"]
    assert blamed(Step().add("param/a.weight:value", "other").add("buffer/b.copy:value", "other")) == [
        "param/a.weight:value"  # level state: who derives what is not known
    ]


def test_tracked_state_inherits_from_parameters() -> None:
    assert blamed(Step().add("param/fc.weight:value", "other").add("extra/ema:fc", "other")) == [
        "param/fc.weight:value"
    ]
    assert blamed(Step().add("param/fc.weight:value").add("extra/ema:fc", "other")) == ["extra/ema:fc"]


def test_an_extra_call_explains_what_differs_after_it_and_says_how_much() -> None:
    step = Step()
    step.add("forward/probe:out", "candidate", group=step.group("forward", "probe"))
    step.add("forward/drop:in.0").add("forward/drop:out", "other", inputs=("forward/drop:in.0",))
    attribution, _ = attribute(step)
    assert blamed(step) == ["forward/probe:out"]
    assert attribution.blames[0].inherited_structure == 1


# ---------------------------------------------------------------- level op


def operation(step: Step, where: str, op: str) -> int:
    return step.group("op", where, op)


def test_an_operation_is_named_and_not_the_module_around_it() -> None:
    step = Step().add("batch/:in.0")
    outer = step.group("forward", "mix", "Mix")
    op = step.group("op", "mix", "aten.index_put_.default", parent=outer)
    step.add("forward/mix:aten.index_put_.default.self", inputs=("batch/:in.0",), group=op)
    step.add(
        "forward/mix:aten.index_put_.default.self.written",
        "other",
        inputs=("forward/mix:aten.index_put_.default.self",),
        group=op,
    )
    step.add("forward/mix:out", "other", inputs=("batch/:in.0",), group=outer)
    assert blamed(step) == ["forward/mix:aten.index_put_.default.self.written"]


def test_an_operation_of_the_optimizer_explains_the_parameters_it_leaves() -> None:
    step = Step().add("grad/fc.weight:grad")
    op = operation(step, "", "aten.addcdiv_.default")
    step.add(
        "optim/:aten.addcdiv_.default.self.written", "other", inputs=("grad/fc.weight:grad",), group=op, root="SGD"
    )
    step.add("param/fc.weight:value", "other").add("optim/fc.weight:exp_avg", "other")
    assert blamed(step) == ["optim/:aten.addcdiv_.default.self.written"]


def test_a_generator_that_an_operation_draws_from_is_the_origin_of_its_mask() -> None:
    step = Step().add("forward/drop:in.0")
    op = operation(step, "drop", "aten.bernoulli_.float")
    step.add("rng/torch.cpu:forward.drop.aten.bernoulli_.float.generator", "other", group=op)
    step.add(
        "forward/drop:aten.bernoulli_.float.out",
        "other",
        inputs=("rng/torch.cpu:forward.drop.aten.bernoulli_.float.generator",),
        group=op,
    )
    assert blamed(step) == ["rng/torch.cpu:forward.drop.aten.bernoulli_.float.generator"]


def test_a_generator_that_is_elsewhere_because_of_an_earlier_difference_is_no_origin() -> None:
    step = Step()
    step.add("forward/router:out", "other", group=step.group("forward", "router"))
    op = operation(step, "drop", "aten.bernoulli_.float")
    step.add("rng/torch.cpu:forward.drop.aten.bernoulli_.float.generator", "other", group=op)
    assert blamed(step) == ["forward/router:out"]


def test_data_that_only_an_operation_sees_is_one_origin_with_the_batch() -> None:
    step = Step().add("batch/:in.0", "other")
    op = operation(step, "program", "aten.nll_loss_forward.default")
    step.add("batch/program:aten.nll_loss_forward.default.target", "other", group=op)
    attribution, _ = attribute(step)
    assert blamed(step) == ["batch/:in.0"]
    assert len(attribution.blames[0].members) == 2


def test_a_generator_that_an_operation_draws_from_explains_no_other_operation() -> None:
    step = Step().add("forward/drop:in.0")
    op = operation(step, "drop", "aten.bernoulli_.float")
    step.add("rng/torch.cpu:forward.drop.aten.bernoulli_.float.generator", "other", group=op)
    mix = operation(step, "mix", "aten.mm.default")
    step.add("forward/mix:aten.mm.default.out", "other", inputs=("forward/drop:in.0",), group=mix)
    assert blamed(step) == [
        "rng/torch.cpu:forward.drop.aten.bernoulli_.float.generator",
        "forward/mix:aten.mm.default.out",
    ]


def test_arguments_that_code_in_a_module_chose_otherwise_are_one_origin() -> None:
    step = Step().add("forward/mix:in.0")
    for number in range(3):
        op = operation(step, "mix", f"aten.mm.{number}")
        step.add(f"forward/mix:aten.mm.{number}.self", "other", inputs=("forward/mix:in.0",), group=op)
        step.add(f"forward/mix:aten.mm.{number}.out", "other", inputs=(f"forward/mix:aten.mm.{number}.self",), group=op)
    attribution, _ = attribute(step)
    assert blamed(step) == ["forward/mix:aten.mm.0.self"]
    assert len(attribution.blames[0].members) == 3


@pytest.mark.parametrize(("slot", "is_inherited"), [("self", True), ("out", False)])
def test_what_a_backward_operation_reads_inherits_from_the_forward_of_its_module(slot: str, is_inherited: bool) -> None:
    step = Step().add("forward/mix:in.0").add("backward/mix:grad_out")
    forward = operation(step, "mix", "aten.mm.default")
    step.add("forward/mix:aten.mm.default.self", "other", inputs=("forward/mix:in.0",), group=forward)
    backward = operation(step, "mix", "aten.mul.Tensor in MmBackward0")
    site = f"backward/mix:aten.mul.Tensor.{slot}"
    step.add(site, "other", inputs=("backward/mix:grad_out",), group=backward)
    assert blamed(step) == ["forward/mix:aten.mm.default.self", *([] if is_inherited else [site])]


def test_clipping_that_reads_reduced_gradients_inherits_from_the_rank_at_fault() -> None:
    ranks = []
    for rank in range(2):
        step = Step()
        step.add("backward/fc.weight:grad", "other" if rank == 1 else "same", group=step.group("backward", "fc"))
        op = operation(step, "program", "aten.linalg_vector_norm.default")
        step.add(
            "grad/program:aten.linalg_vector_norm.default.self", "other", group=op, inputs=("backward/fc.weight:grad",)
        )
        ranks.append(step)
    assert blamed(*ranks) == ["backward/fc.weight:grad"]
