"""An ordinary training loop: a small character model on Python's help texts. It knows nothing of bitcheck.

python train.py [--steps N] [--seed S] [--save FILE] [--resume FILE]
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

BATCH, CONTEXT, WIDTH = 16, 32, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class CharacterModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text):
        x = self.characters(text) + self.positions(torch.arange(text.shape[1]))
        return self.head(self.blocks(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="write a checkpoint here at the end")
    parser.add_argument("--resume", help="go on from this checkpoint")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    data = torch.tensor(list("".join(topics.values()).encode()))
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if options.resume:
        checkpoint = torch.load(options.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])
        first = checkpoint["step"]

    for step in range(first, options.steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        window = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}")

    if options.save:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "rng": torch.get_rng_state(), "step": options.steps}, options.save)


if __name__ == "__main__":
    main()
