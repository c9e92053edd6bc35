"""A Ray actor that starts the fork server of its workers, and only then imports what it needs itself.

The two imports take 0.25 s each, and go on side by side. For that, what stands here travels to the actor by value,
and so does `parallelenv.backends.fork_server`: by name they would bring the whole package with them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from parallelenv.backends import fork_server
from parallelenv.backends.fork_server import deaf_to_interrupts, sleepy_blas, start_server


class RaySubprocHost:
    """Passes on what it is called with, once the package is there.

    Args:
        module: Where the class is of what it passes that on to, a `RayHost`.
        name: Its name.
        arguments: For it; of builtin types, as what arrives before this class is at work.
    """

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        # Who needs the server starts it if it is not there, and says what is in the way.
        with contextlib.suppress(OSError), sleepy_blas(), deaf_to_interrupts("forkserver"):
            start_server()
        self._host = getattr(importlib.import_module(module), name)(*arguments)

    def introduce(self) -> Any:  # noqa: D102 (see RayHost)
        return self._host.introduce()

    def serve(self, path: str) -> None:  # noqa: D102 (see RayHost)
        self._host.serve(path)

    def attach(self, message: Any) -> None:  # noqa: D102 (see RayHost)
        self._host.attach(message)

    def execute(self, *message: Any) -> Any:  # noqa: D102 (see RayHost)
        return self._host.execute(*message)

    def close(self) -> Any:  # noqa: D102 (see RayHost)
        return self._host.close()


@contextlib.contextmanager
def travelling_by_value() -> Iterator[None]:
    """Let Ray send what stands here by value meanwhile.

    Where another thread ends its own meanwhile first, it goes by name: the actor then starts later, and works as well.
    """
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")  # it has no types
    known = cloudpickle.list_registry_pickle_by_value()
    ours = [module for module in (sys.modules[__name__], fork_server) if module.__name__ not in known]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)
