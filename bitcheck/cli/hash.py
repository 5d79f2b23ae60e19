"""`bitcheck hash`: the digests of the tensors in checkpoint files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bitcheck.cli.progress import show_progress
from bitcheck.digest import DIGEST_VERSION

if TYPE_CHECKING:
    from bitcheck.hashing import HashedFile


@click.command("hash")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bitcheck.hash/1) instead of a table.")
def command(files: tuple[Path, ...], as_json: bool) -> None:
    """Print the digest of each tensor in .safetensors and .pt files.

    A digest covers the tensor's dtype, shape and exact bits, and is the number that a run holds for
    the same tensor (`bitcheck show RUN`), so a checkpoint can be compared with a run, or two
    checkpoints with each other. Nested dicts and lists of a .pt file give dotted names. A .pt file
    is read with weights_only=True: one that holds code is refused.

    \b
    Example:
      bitcheck hash model.safetensors
      bitcheck hash --json checkpoint.pt
    """
    from bitcheck.hashing import HashedTensor, hash_file

    hashed: list[HashedFile] = []
    total = sum(path.stat().st_size for path in files if path.is_file())
    done = 0
    with show_progress("hashing") as progress:

        def on_tensor(tensor: HashedTensor) -> None:
            nonlocal done
            done += tensor.num_bytes
            if progress is not None:
                progress(done, total)

        for path in files:
            hashed.append(hash_file(path, on_tensor))
    if as_json:
        click.echo(json.dumps(as_document(hashed), indent=1))
    else:
        print_tables(hashed)


def as_document(hashed: list[HashedFile]) -> dict[str, object]:
    """Return the files as schema bitcheck.hash/1 has them."""
    return {
        "schema": "bitcheck.hash/1",
        "digest_version": DIGEST_VERSION,
        "files": [
            {
                "path": str(file.path),
                "format": file.format,
                "tensors": [
                    {
                        "name": tensor.name,
                        "dtype": tensor.dtype,
                        "shape": list(tensor.shape),
                        "bytes": tensor.num_bytes,
                        "digest": tensor.digest.hex(),
                    }
                    for tensor in file.tensors
                ],
                "other_values": file.num_other_values,
            }
            for file in hashed
        ],
    }


def print_tables(hashed: list[HashedFile]) -> None:
    """Print a table a file; names last and whole, however long, also into a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for file in hashed:
        table = Table(box=None, pad_edge=False, title=Text(str(file.path)), title_justify="left", title_style="bold")
        for heading, justify in (("digest", "left"), ("dtype", "left"), ("shape", "left"), ("bytes", "right")):
            table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("name", overflow="fold")
        for tensor in file.tensors:
            shape = ",".join(map(str, tensor.shape))
            cells = (tensor.digest.hex(), tensor.dtype, f"[{shape}]", f"{tensor.num_bytes:,}", tensor.name)
            table.add_row(*map(Text, cells))
        if not console.is_terminal:
            console.width += max((len(tensor.name) for tensor in file.tensors), default=0)
        console.print(table)
        others = f", {file.num_other_values:,} other values not digested" if file.num_other_values else ""
        num_bytes = sum(tensor.num_bytes for tensor in file.tensors)
        console.print(Text(f"{len(file.tensors):,} tensors, {num_bytes:,} bytes{others}"))
