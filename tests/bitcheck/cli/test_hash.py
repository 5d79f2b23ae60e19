from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

import bitcheck
from bitcheck.cli import main
from bitcheck.errors import UnreadableFile
from bitcheck.events import Phase
from bitcheck.hashing import HashedTensor, hash_file
from bitcheck.hooks.tensors import digest_tensor, dtype_name
from bitcheck.run import open_run

LONG_NAME = "model.layers[0]." + "very_long_block_name." * 5 + "weight"


def hash_command(*arguments: str | Path) -> Result:
    """Run `bitcheck hash`, its output going into a pipe."""
    return CliRunner().invoke(main, ["hash", *map(str, arguments)])


def expected(name: str, tensor: torch.Tensor) -> HashedTensor:
    return HashedTensor(name, dtype_name(tensor), tuple(tensor.shape), tensor.nbytes, digest_tensor(tensor)[0])


DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]


def tensors() -> dict[str, torch.Tensor]:
    made = {}
    for name in DTYPES:
        data = torch.arange(96, dtype=torch.uint8) & (1 if name == "bool" else 255)
        made[f"of.{name}"] = data.view(getattr(torch, name)).reshape(2, -1)
    return made | {
        "scalar": torch.tensor(-0.0),
        "empty": torch.zeros(0, 3),
        LONG_NAME: torch.arange(5600.0).view(70, 80),
    }


def test_a_safetensors_file_gives_the_digests_of_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors(), path, metadata={"format": "pt"})
    hashed = hash_file(path)
    assert (hashed.format, hashed.num_other_values) == ("safetensors", 0)
    assert sorted(hashed.tensors) == sorted(expected(name, tensor) for name, tensor in tensors().items())


def test_a_safetensors_file_is_read_without_torch(tmp_path: Path) -> None:
    safetensors.torch.save_file(tensors(), tmp_path / "model.safetensors")
    code = "import sys\nfrom bitcheck.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "hash", tmp_path / "model.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert LONG_NAME in done.stdout


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pt_file_names_its_tensors_by_dotted_keys(tmp_path: Path, is_zip: bool) -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    weight = model.weight.detach()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rest": [torch.ones(2), ("text", torch.zeros(1)), None, OrderedDict(t=weight.t())],
        "epoch": 3,
    }
    torch.save(saved, tmp_path / "state.pt", _use_new_zipfile_serialization=is_zip)
    hashed = hash_file(tmp_path / "state.pt")
    state = optimizer.state[model.weight]
    names = {
        "model.weight": weight,
        "optimizer.state.0.step": state["step"],
        "optimizer.state.0.exp_avg": state["exp_avg"],
        "optimizer.state.0.exp_avg_sq": state["exp_avg_sq"],
        "rest.0": torch.ones(2),
        "rest.1.1": torch.zeros(1),
        "rest.3.t": weight.t(),
    }
    assert hashed.format == "torch"
    assert hashed.tensors == [expected(name, tensor) for name, tensor in names.items()]
    assert hashed.num_other_values > 3


def test_the_parts_of_a_sparse_tensor_in_a_pt_file_are_named(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    torch.save({"s": sparse}, tmp_path / "state.pt")
    assert [tensor.name for tensor in hash_file(tmp_path / "state.pt").tensors] == ["s.indices", "s.values"]


def test_a_bare_tensor_in_a_pt_file_has_an_empty_name(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    assert hash_file(tmp_path / "tensor.pt").tensors == [expected("", torch.ones(3))]


def test_both_kinds_of_file_agree_on_the_same_state_dict(tmp_path: Path) -> None:
    state = torch.nn.TransformerEncoderLayer(16, 2).state_dict()
    torch.save(state, tmp_path / "state.pt")
    safetensors.torch.save_file(state, tmp_path / "state.safetensors")
    assert sorted(hash_file(tmp_path / "state.pt").tensors) == sorted(hash_file(tmp_path / "state.safetensors").tensors)


def test_the_kind_of_a_file_is_told_by_its_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.bin")
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "w.pt")
    assert (
        hash_file(tmp_path / "w.bin").tensors == hash_file(tmp_path / "w.pt").tensors == [expected("w", torch.ones(3))]
    )


def test_json_is_one_document_for_all_files(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 3), "epoch": 1}, tmp_path / "a.pt")
    safetensors.torch.save_file({LONG_NAME: torch.ones(3)}, tmp_path / "b.safetensors")
    done = hash_command("--json", tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    digest = digest_tensor(torch.ones(2, 3))[0].hex()
    assert document["schema"] == "bitcheck.hash/1"
    assert document["digest_version"] == 1
    assert document["files"][0] == {
        "path": str(tmp_path / "a.pt"),
        "format": "torch",
        "tensors": [{"name": "w", "dtype": "float32", "shape": [2, 3], "bytes": 24, "digest": digest}],
        "other_values": 1,
    }
    assert document["files"][1]["tensors"][0]["name"] == LONG_NAME


def test_a_table_in_a_pipe_keeps_long_names_and_brackets_whole_on_one_line(tmp_path: Path) -> None:
    assert len(LONG_NAME) > 120
    torch.save({LONG_NAME: torch.ones(3), "epoch": 1}, tmp_path / "a.pt")
    done = hash_command(tmp_path / "a.pt")
    (line,) = [line for line in done.stdout.splitlines() if LONG_NAME in line]
    assert line.split() == [digest_tensor(torch.ones(3))[0].hex(), "float32", "[3]", "12", LONG_NAME]
    assert done.stdout.splitlines()[-1] == "1 tensors, 12 bytes, 1 other values not digested"


def test_the_digests_of_a_checkpoint_are_those_that_a_run_holds(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    with bitcheck.record(tmp_path / "run", model=model, optimizer=optimizer, level="state") as rec:
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        rec.step()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    with open_run(tmp_path / "run") as run:
        step = run.rank(0).load(1)
    recorded = {
        site.path: bytes(digest)
        for site, digest in zip(step.sites, step.digests, strict=True)
        if site.phase in (Phase.PARAM, Phase.BUFFER)
    }
    assert len(recorded) == 7
    assert {tensor.name: tensor.digest for tensor in hash_file(tmp_path / "state.pt").tensors} == recorded


# --- files that are not what they should be


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ['BITCHECK_TEST_CANARY']}",)


def write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(RunsCode(), protocol=2))


def write_cut(path: Path) -> None:
    torch.save({"w": torch.randn(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])


def write_module(path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), path)


def write_header(path: Path, entry: dict[str, Any], num_bytes: int) -> None:
    header = json.dumps({"w": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))


def write_script(path: Path) -> None:
    graph = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))
    torch.jit.save(graph, str(path))


BAD = {
    "code.pt": (lambda path: torch.save({"w": RunsCode()}, path), "it asks for posix.system"),
    "code_in_a_bare_pickle.pt": (write_pickle, "it asks for posix.system"),
    "module.pt": (write_module, "it asks for torch.nn.modules.linear.Linear"),
    "cut.pt": (write_cut, "not a whole file of tensors"),
    "empty.pt": (lambda path: path.touch(), "neither a .safetensors nor a .pt file"),
    "text.pt": (lambda path: path.write_text("step 1, loss 2.0\n"), "neither a .safetensors nor a .pt file"),
    "folder.pt": (lambda path: path.mkdir(), "Is a directory"),
    "missing.pt": (lambda path: None, "No such file"),
    "empty.safetensors": (lambda path: path.touch(), "not a whole .safetensors file"),
    "text.safetensors": (lambda path: path.write_text("step 1, loss 2.0\n"), "not a whole .safetensors file"),
    "cut.safetensors": (
        lambda path: write_header(path, {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, 15),
        "not a whole .safetensors file",
    ),
    "lying.safetensors": (
        lambda path: write_header(path, {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}, 16),
        "not a whole .safetensors file",
    ),
    "unknown.safetensors": (
        lambda path: write_header(path, {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}, 3),
        "w has dtype F6_E2M3, which PyTorch has no name for",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_sentence_and_exit_status_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "executed"
    monkeypatch.setenv("BITCHECK_TEST_CANARY", str(canary))
    write, message = BAD[name]
    write(tmp_path / name)
    done = hash_command("--json", tmp_path / name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"bitcheck: {tmp_path / name}: ")
    assert not canary.exists()


def test_the_canary_would_have_been_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITCHECK_TEST_CANARY", str(tmp_path / "executed"))
    torch.save({"w": RunsCode()}, tmp_path / "code.pt")
    torch.load(tmp_path / "code.pt", weights_only=False)
    assert (tmp_path / "executed").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    write_script(tmp_path / "script.pt")
    with pytest.raises(UnreadableFile, match="it is a TorchScript program"):
        hash_file(tmp_path / "script.pt")


def test_no_file_named_is_a_usage_error() -> None:
    assert hash_command().exit_code == 2
