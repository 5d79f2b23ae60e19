"""Execute one operation again and again on the same inputs, and count how often its bits differ.

    python repro.py                 50 executions under load
    python repro.py -k 500 --idle   500 executions, nothing else running
    python repro.py --json

Needs torch only. `repro.pt` beside this file holds the inputs as they were in the training job
(strides, dtypes and overlaps included), the random generators' states and PyTorch's switches; it is
read with weights_only=True, so that nothing in it is executed.

Exit status: 1 where executions differ, 0 where all agree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ALIGNMENT_BYTES = 64
_LOAD_SIZE = 384


def find_operator(name: str) -> Any:
    """Return the operator overload `aten.mm.default`. Raises LookupError where its library is not imported."""
    namespace, packet, overload = (
        name.split(".", 1)[0],
        name.split(".", 1)[1].rpartition(".")[0],
        name.rpartition(".")[2],
    )
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise LookupError(f"no operator {name}: import the library that defines it at the top of this file") from None


def decode(value: Any, storages: list[torch.Tensor]) -> Any:
    """Return an argument as it was. `storages` are the bytes of the memory that the tensors lie in."""
    kind, content = value
    if kind == "tensor":
        dtype = getattr(torch, content["dtype"])
        flat = storages[content["storage"]]
        tensor = torch.empty(0, dtype=dtype, device=flat.device)
        tensor.set_(flat.untyped_storage(), content["offset"], tuple(content["size"]), tuple(content["stride"]))
        return with_bits(tensor, content.get("is_conj", False), content.get("is_neg", False))
    if kind in ("list", "tuple"):
        members = [decode(member, storages) for member in content]
        return tuple(members) if kind == "tuple" else members
    if kind == "torch":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "generator":
        return torch.default_generator if content == "cpu" else torch.cuda.default_generators[int(content)]
    return content


def with_bits(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    """Return a tensor over the same memory that stands for its conjugate, for its negative, or for both."""
    if is_conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if is_neg else tensor


def set_switches(switches: dict[str, Any]) -> None:
    """Set PyTorch as it was in the training job."""
    torch.set_num_threads(switches["num_threads"])
    torch.use_deterministic_algorithms(switches["deterministic"], warn_only=switches["warn_only"])
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = switches["fill_uninitialized_memory"]
    torch.backends.cudnn.benchmark = switches["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = switches["cudnn_deterministic"]
    torch.set_float32_matmul_precision(switches["matmul_precision"])


def set_generators(states: dict[str, torch.Tensor]) -> None:
    """Put the random generators where they were; `cpu`, or a CUDA device's number, -> uint8 state."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, int(name))


def execute(data: dict[str, Any]) -> list[torch.Tensor]:
    """Execute the operation once on fresh copies of its inputs; return all it gave and all it wrote.

    Without what it gives for its own backward alone, which is chance in part.
    """
    storages = [flat.clone() for flat in data["storages"]]
    args = [decode(value, storages) for value in data["args"]]
    kwargs = {name: decode(value, storages) for name, value in data["kwargs"].items()}
    set_generators(data["generators"])
    result = find_operator(data["op"])(*args, **kwargs)
    if data["private"]:
        result = [member for place, member in enumerate(result) if place not in data["private"]]
    found = list(_tensors(result))
    written = [value for name in data["written"] for value in _tensors(_argument(data, args, kwargs, name))]
    return [tensor.detach().clone() for tensor in (*found, *written)]


def _argument(data: dict[str, Any], args: list[Any], kwargs: dict[str, Any], name: str) -> Any:
    return kwargs[name] if name in kwargs else args[data["names"].index(name)]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Say whether two results are the same in every bit (NaNs and signs of zero too)."""
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.equal(_bytes(a), _bytes(b)) for a, b in zip(first, second, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def load(device: torch.device, num_threads: int) -> Iterator[None]:
    """Keep the machine busy: matrix products in other threads, on a GPU on side streams."""
    stop = threading.Event()

    def work() -> None:
        left = torch.ones(_LOAD_SIZE, _LOAD_SIZE, device=device)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        while not stop.is_set():
            if stream is None:
                left @ left
            else:
                with torch.cuda.stream(stream):
                    left @ left
                stream.synchronize()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a rate (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    z = 1.959963984540054
    rate, scale = count / total, 1 + z * z / total
    middle = (rate + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def count_differences(
    data: dict[str, Any], executions: int, num_busy: int, once: Callable[[dict[str, Any]], list[torch.Tensor]] = execute
) -> dict[str, Any]:
    """Execute the operation once and then `executions` times; count those whose bits are not the first's."""
    devices = [flat.device for flat in data["storages"]]
    device = next((each for each in devices if each.type == "cuda"), torch.device("cpu"))
    set_switches(data["switches"])
    results: list[list[torch.Tensor]] = []
    differing = 0
    with load(device, num_busy):
        first = once(data)
        results.append(first)
        for _ in range(executions):
            result = once(data)
            differing += not same_bits(first, result)
            if not any(same_bits(known, result) for known in results) and len(results) < 16:
                results.append(result)
    low, high = wilson(differing, executions)
    return {
        "op": data["op"],
        "executions": executions,
        "differing": differing,
        "distinct": len(results),
        "interval": [low, high],
        "busy_threads": num_busy,
    }


def describe(answer: dict[str, Any]) -> str:
    """Return the answer in sentences."""
    op, count, total = answer["op"], answer["differing"], answer["executions"]
    low, high = (f"{100 * limit:.1f} %" for limit in answer["interval"])
    if count:
        return (
            f"{op} differs in {count} of {total} executions on the same inputs (95 % interval {low} to {high}; "
            f"{answer['distinct']}{' or more' if answer['distinct'] == 16 else ''} different results)."
        )
    return (
        f"{op} gave the same bits in all of {total} executions on the same inputs (95 % interval of the rate: 0 to "
        f"{high}). The cause is then most likely outside the operation: uninitialised memory that it reads, a race "
        "with another stream or thread, or an argument that was not seen. Try next: `bitcheck scan --poison -- CMD` "
        "(reads of uninitialised memory), the same job with one stream (CUDA_LAUNCH_BLOCKING=1) or one thread "
        "(OMP_NUM_THREADS=1), more executions (-k), or another machine."
    )


def main(arguments: list[str] | None = None) -> int:
    """Parse, execute, print; return the exit status."""
    parser = argparse.ArgumentParser(description="Execute one operation again and again on the same inputs.")
    parser.add_argument("-k", "--executions", type=int, default=50, metavar="K", help="executions (50)")
    parser.add_argument("--idle", action="store_true", help="put no load on the machine")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument("data", nargs="?", default=str(Path(__file__).resolve().with_suffix(".pt")), help="the inputs")
    options = parser.parse_args(arguments)
    data = torch.load(options.data, weights_only=True)
    num_busy = 0 if options.idle else max(1, (os.cpu_count() or 1) // 2)
    try:
        answer = count_differences(data, options.executions, num_busy)
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    text = describe(answer)
    print(json.dumps(answer | {"explanation": text}) if options.json else text)
    return 1 if answer["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())
