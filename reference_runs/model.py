"""The whole model: tokens and targets in, losses out.

It is one outermost module whose forward computes the loss itself, so that everything a step depends
on enters through its arguments and bitcheck sees it as `batch`.

Legend: B sequences, S positions, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcheck.reference_runs.block import Block
from bitcheck.reference_runs.configs import ModelConfig
from bitcheck.reference_runs.embedding import Embedding, Head
from bitcheck.reference_runs.linear import Precision, Weight
from bitcheck.reference_runs.mla import rotations
from bitcheck.reference_runs.moe import MoE, Router
from bitcheck.reference_runs.mtp import MTP
from bitcheck.reference_runs.norm import RMSNorm
from bitcheck.reference_runs.switches import Switches


class Losses(NamedTuple):
    """What a forward returns, float32 and 0-d each."""

    total: Tensor
    """main + mtp_lambda * mtp + balance: what to call `backward` on."""
    main: Tensor
    """Cross entropy of the next byte, in nats."""
    mtp: Tensor
    """Cross entropy of the byte after the next, in nats."""
    balance: Tensor


class CrossEntropy(nn.Module):
    """Mean cross entropy in nats, in FP32."""

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return float32 0-d for float32 `logits_BSV` and int64 `targets_BS`."""
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


class Model(nn.Module):
    """A DeepSeek-V3-style language model over bytes with its training loss."""

    rotation: Tensor

    def __init__(self, config: ModelConfig, seq_len: int, precision: Precision, switches: Switches) -> None:
        super().__init__()
        self.config = config
        is_norm_fixed = switches.is_fixed("norm.dweight")
        is_embedding_fixed = switches.is_fixed("embedding.backward")
        self.embedding = Embedding(config.vocab, config.d_model, config.init_std, is_embedding_fixed)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            Block(config, mixer, index < config.num_dense, precision, switches)
            for index, mixer in enumerate(config.mixers)
        )
        self.norm = RMSNorm(config.d_model, config.norm_eps, is_norm_fixed)
        self.head = Head(config.d_model, config.vocab, config.init_std)
        self.mtp = MTP(config, precision, switches)
        self.loss = CrossEntropy()
        self.register_buffer("rotation", rotations(seq_len, config.d_rope, config.rope_theta), persistent=False)

    def forward(self, inputs_BS: Tensor, targets_BS2: Tensor) -> Losses:
        """Return the losses for int64 `inputs_BS` and `targets_BS2`: the next token and the one after."""
        x_BSD = self.embed(inputs_BS)
        balance = torch.zeros((), device=x_BSD.device)
        for layer in self.layers:
            x_BSD, layer_balance = layer(x_BSD, self.rotation)
            balance = balance + layer_balance
        return self.losses(x_BSD, balance, targets_BS2)

    def embed(self, inputs_BS: Tensor) -> Tensor:
        """Return what the first layer gets, bfloat16 [B, S, D], for int64 `inputs_BS`."""
        x_BSD: Tensor = self.dropout(self.embedding(inputs_BS))
        return x_BSD.bfloat16()

    def losses(self, x_BSD: Tensor, balance: Tensor, targets_BS2: Tensor) -> Losses:
        """Return the losses for what the last layer gives, bfloat16, and the layers' balance losses, float32 0-d."""
        next_BS, after_BS = targets_BS2.unbind(-1)
        main = self.loss(self.head(self.norm(x_BSD)), next_BS)
        mtp_BSD, mtp_balance = self.mtp(x_BSD, self.embedding(next_BS), self.rotation)
        mtp = self.loss(self.head(mtp_BSD), after_BS)
        balance = balance + mtp_balance
        return Losses(main + self.config.mtp_lambda * mtp + balance, main, mtp, balance)

    def draw_only(self, inputs_BS: Tensor) -> None:
        """Draw what a training forward of `inputs_BS` would from PyTorch's generator, and forget it.

        For a micro-batch that another rank works on: so the generators of all ranks stay those of one process.
        """
        zeros = torch.zeros(*inputs_BS.shape, self.config.d_model, device=inputs_BS.device)
        F.dropout(zeros, self.config.dropout)

    def routers(self) -> dict[str, Router]:
        """Return every router by its qualified name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Router)}

    def expert_layers(self) -> list[MoE]:
        """Return the mixtures of experts, in the order of the layers."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def derive_weights(self) -> None:
        """Make every FP8 weight anew from its BF16 parameter: after a step, and after loading."""
        for module in self.modules():
            if isinstance(module, Weight):
                module.derive()

    def finish_step(self) -> None:
        """Do what follows the optimizer's step: derive FP8 weights, move the routers' biases."""
        self.derive_weights()
        for router in self.routers().values():
            router.update_bias()
