"""The modules that users, workers and actors import."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from modes import PROCESSES, RAY_POOLS
from scripts import run

from parallelenv import registry

_OF_USERS = {"adapters", "autotune", "collect", "notebook", "tasks", "testing", "wrappers"}

# An env that is pickled by value, so that its worker imports only modules that this package needs, none of the tests.
_LOOK = """
from parallelenv import ParallelEnv

class Looking:
    def modules(self):
        return sorted(name for name in sys.modules if name.startswith("parallelenv."))

with ParallelEnv([Looking, Looking], {mode!r}, num_cpus=2, start_method={start_method!r}) as env:
    names = env.customized_method("modules")[1]
"""


def found(code: str, names: str = "names") -> set[str]:
    """Run code, and return the names in an expression."""
    printed, error, status = run(f"import json, sys\n{code}\nprint(json.dumps(list({names})))", timeout=100)
    assert status == 0, error
    return set(json.loads(printed.splitlines()[-1]))


def rings(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("parallelenv.")}


def test_importing_the_package_imports_no_submodules() -> None:
    modules = found("import parallelenv", "sys.modules")
    assert rings(modules) == set()
    assert modules.isdisjoint({"numpy", "gymnasium", "cloudpickle", "asyncio"})


def test_parallel_env_imports_neither_higher_layers_nor_backends() -> None:
    modules = found("from parallelenv import ParallelEnv, registry; registry.known_words()", "sys.modules")
    assert rings(modules).isdisjoint({"backends", "cli", *_OF_USERS})
    assert RAY_POOLS in registry.known_words()


def test_each_public_name_can_be_imported() -> None:
    unset = "name for name in dir(parallelenv) if getattr(parallelenv, name) is None"
    assert found("import parallelenv", f"({unset})") == set()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_worker_imports_only_contract_worker_and_backend(start_method: str) -> None:
    modules = found(_LOOK.format(mode=PROCESSES, start_method=start_method))
    assert rings(modules) == {"backends", "contract", "errors", "worker"}


def test_pyproject_lists_all_packages() -> None:
    root = Path(__file__).parents[1]
    listed = re.search(r"^packages = (.*)$", (root / "pyproject.toml").read_text(), re.MULTILINE)
    folders = {f"parallelenv.{path.parent.name}" for path in root.glob("parallelenv/*/__init__.py")}
    assert listed
    assert folders | {"parallelenv"} == set(re.findall(r'"([\w.]+)"', listed[1]))
