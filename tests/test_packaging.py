from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import xxhash

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = {
    "bitcheck": ROOT / "bitcheck",
    "bitcheck.hooks": ROOT / "hooks",
    "bitcheck.reference_runs": ROOT / "reference_runs",
}
"""Import name -> folder."""
SHARED = ".pyd" if os.name == "nt" else ".so"
COMPILER = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]


def folders() -> dict[str, Path]:
    """Return every folder with an `__init__.py` as a package's name -> where it lies; links are not followed."""
    found = {}
    for name, top in SOURCES.items():
        for folder, subfolders, files in os.walk(top):
            subfolders[:] = [
                sub for sub in subfolders if sub != "__pycache__" and not (Path(folder) / sub).is_symlink()
            ]
            if "__init__.py" in files:
                found[".".join((name, *Path(folder).relative_to(top).parts))] = Path(folder)
    return found


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command with nothing of this checkout on its path; return its standard output."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list_of_packages_is_the_folders_that_are_packages() -> None:
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders())


def test_the_links_into_the_package_are_relative_and_lead_to_the_folders() -> None:
    assert os.readlink(ROOT / "bitcheck/hooks") == "../hooks"
    assert os.readlink(ROOT / "bitcheck/reference_runs") == "../reference_runs"
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    assert mapping == {"bitcheck.hooks": "hooks", "bitcheck.reference_runs": "reference_runs"}


def test_every_file_of_the_compiled_part_is_named_where_it_is_built() -> None:
    (extension,) = PROJECT["tool"]["setuptools"]["ext-modules"]
    assert extension["name"] == "bitcheck.hooks._native"
    assert extension["optional"]
    for key, ending in (("sources", "c"), ("depends", "h")):
        assert extension[key] == sorted(
            file.relative_to(ROOT).as_posix() for file in (ROOT / "hooks/csrc").glob(f"*.{ending}")
        )


def build_wheel(copy: Path, **environment: str) -> Path:
    """Return a wheel built from a copy of the checkout that is made at `copy`."""
    pytest.importorskip("setuptools", reason="`make setup` installs it; without it no wheel can be built")
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("bitcheck", "hooks", "reference_runs"):
        ignored = shutil.ignore_patterns("__pycache__", f"_native*{SHARED}")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    build = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        "out",
        ".",
    )
    run(*build, cwd=copy, **environment)
    (built,) = (copy / "out").glob("*.whl")
    return built


def files_in(wheel: Path) -> set[str]:
    """Return the names of what a wheel installs, less what describes it."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel built from a copy of the checkout."""
    return build_wheel(tmp_path_factory.mktemp("checkout") / "copy")


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    expected = set()
    for name, top in SOURCES.items():
        for folder, subfolders, files in os.walk(top):
            subfolders[:] = [
                sub for sub in subfolders if sub != "__pycache__" and not (Path(folder) / sub).is_symlink()
            ]
            within = Path(*name.split("."), Path(folder).relative_to(top))
            expected |= {(within / file).as_posix() for file in files if not file.endswith(SHARED)}
    expected = {name for name in expected if not name.startswith("bitcheck/hooks/csrc/")}
    assert {name for name in files_in(wheel) if not name.endswith(SHARED)} == expected


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C compiler")
def test_the_wheel_holds_the_compiled_part_where_there_is_a_compiler(wheel: Path, tmp_path: Path) -> None:
    (compiled,) = (name for name in files_in(wheel) if name.endswith(SHARED))
    assert compiled == f"bitcheck/hooks/_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    file = Path(zipfile.ZipFile(wheel).extract(compiled, tmp_path))
    code = "import _native; print(_native.xxh3_128(bytes(20)).hex())"
    printed = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(file.parent))
    assert printed.strip() == xxhash.xxh3_128_hexdigest(bytes(20))


def test_a_wheel_is_built_without_a_compiler_and_is_the_same_but_for_the_compiled_part(
    wheel: Path, tmp_path: Path
) -> None:
    without = build_wheel(tmp_path / "copy", CC="/bin/false")
    assert files_in(without) == {name for name in files_in(wheel) if not name.endswith(SHARED)}


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (licence,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
    assert b"Apache License" in archive.read(licence)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert b"bitcheck = bitcheck.cli:main" in archive.read(entry_points)


def test_an_installed_wheel_answers_in_a_folder_of_its_own(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    dependencies = next(path for path in sys.path if (Path(path) / "click").is_dir())
    (site / "dependencies.pth").write_text(dependencies, encoding="utf-8")
    python = tmp_path / "venv/bin/python"
    assert run(python, "-c", "import bitcheck; print(bitcheck.__file__)", cwd=tmp_path).startswith(str(site))
    assert "Usage: " in run(python, "-m", "bitcheck", "--help", cwd=tmp_path)
    run(python, "-c", "import bitcheck.hooks, bitcheck.reference_runs", cwd=tmp_path)


def test_a_bare_checkout_answers_without_being_installed() -> None:
    assert "Usage: " in run(sys.executable, "-m", "bitcheck", "--help", cwd=ROOT)


def test_the_analysis_side_imports_no_torch() -> None:
    """Every module outside hooks, the trainer and their commands; `bitcheck --help` in particular."""
    modules = [
        ".".join((name, file.stem))
        for name, folder in folders().items()
        if not name.startswith(("bitcheck.hooks", "bitcheck.reference_runs"))
        for file in folder.glob("*.py")
        if not file.stem.startswith("__")
    ]
    code = (
        f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules"
    )
    run(sys.executable, "-c", code, cwd=ROOT)


@pytest.mark.parametrize("arguments", [["--help"], ["diff", "--help"]])
def test_help_starts_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom bitcheck.cli import main\n"
        f"try: main({arguments})\nexcept SystemExit as done: assert not done.code\n"
        "assert 'torch' not in sys.modules and 'h5py' not in sys.modules, 'help imports what it does not need'"
    )
    assert "Usage: " in run(sys.executable, "-c", code, cwd=ROOT)


def test_the_version_is_written_once_more_only_in_the_package() -> None:
    import bitcheck

    assert bitcheck.__version__ == PROJECT["project"]["version"]
    assert f"## {bitcheck.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_says_what_it_is_for_and_has_a_fixed_version_for_development() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    fixed = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    declared = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    for dependency in declared:
        (line,) = [line for line in lines if line.strip().startswith(f'"{dependency}"')]
        assert "#" in line, f"{dependency} does not say what it is for"
        assert f"\n{dependency.partition('>=')[0]}==" in fixed
