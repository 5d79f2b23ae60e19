"""How a recorded program is entered: Python imports this file as it starts, before the program's first line.

`bitcheck run` puts this folder in front of PYTHONPATH. In order, this file
1. takes the folder off `sys.path` again, so that the program sees the path that it would have seen;
2. waits for `torch` to be imported, by a finder on `sys.meta_path`: a program that never imports it
   pays nothing;
3. runs the `sitecustomize` that this one hides (the user's, the distribution's), if there is one.

When the import of `torch` has ended, `bitcheck.hooks.attach.attach` is called. bitcheck is taken from
where the launcher found it, so a bare checkout works and nothing is added to `sys.path`.

It may run in any Python that the program starts, also in one too old for bitcheck: it imports next
to nothing, keeps to syntax of 2016, and never fails a program.
"""

# ruff: noqa: UP031
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

VARIABLE = "BITCHECK_ATTACH"


class _TorchFinder(object):  # noqa: UP004
    """Lets the other finders find `torch`, and calls `then` when its import has ended."""

    def __init__(self, then: "Callable[[], None]") -> None:
        self._then = then
        self._is_asking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != "torch" or self._is_asking:
            return None
        import importlib.util

        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        exec_module = loader.exec_module

        def exec_then_attach(module: "ModuleType") -> None:
            # Where the import fails, this finder stays: the program may catch that and try again.
            exec_module(module)
            vars(loader).pop("exec_module", None)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._then()

        # On this one loader object, not a loader of our own: `torch.__loader__` stays what it is.
        vars(loader)["exec_module"] = exec_then_attach
        return spec


def _import_bitcheck(home: str) -> None:
    """Import bitcheck from the folder `home`, whether or not that is on the program's path."""
    if "bitcheck" in sys.modules:
        return
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        "bitcheck", os.path.join(home, "__init__.py"), submodule_search_locations=[home]
    )
    if spec is None or spec.loader is None:
        raise ImportError("no bitcheck in %s" % home)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bitcheck"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["bitcheck"]
        raise


def _attach() -> None:
    """Hand the process over to bitcheck; a program is never failed by it."""
    import json

    settings = {}  # type: dict[str, Any]
    try:
        settings = json.loads(os.environ[VARIABLE])
        _import_bitcheck(settings["home"])
        from bitcheck.hooks.attach import attach

        attach(settings)
    except Exception as error:  # noqa: BLE001  the program goes on, and its user is told
        _tell_once(settings, error)


def _tell_once(settings: "dict[str, Any]", error: Exception) -> None:
    """Say in one sentence that the program runs unrecorded, from the first process that finds out."""
    import json

    if isinstance(error, ImportError):
        reason = "its Python (%s) lacks what bitcheck needs: %s" % (sys.executable, error)
    elif isinstance(error, SyntaxError):
        reason = "its Python (%s, %d.%d) is too old for bitcheck" % ((sys.executable,) + sys.version_info[:2])  # noqa: RUF005
    else:
        reason = "%s: %s" % (type(error).__name__, error)
    is_first = True
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        marker = os.open(os.path.join(settings["words"], "unattached.jsonl"), flags, 0o666)
        try:
            os.write(marker, (json.dumps({"what": "unattached", "reason": reason}) + "\n").encode("ascii"))
        finally:
            os.close(marker)
    except FileExistsError:
        is_first = False
    except (OSError, KeyError):
        pass
    if is_first:
        sys.stderr.write("bitcheck: the program runs unrecorded: %s\n" % reason)


def _enter() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    if os.environ.get(VARIABLE):
        sys.meta_path.insert(0, _TorchFinder(_attach))


_enter()

# As if this file were not there: the next `sitecustomize` takes this one's place, and where there is
# none, or it fails, `site` sees the very exception that it would have seen.
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
