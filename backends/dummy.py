"""The mode ``dummy``: all envs are in this process, and the caller steps them one after another.

This mode is the reference: all other modes must give the same results. It is also the fastest mode if a step takes less
time than a message between processes, which takes about 10 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallelenv.backends._in_process import CallerChannel, CallerStep, InProcessBackend
from parallelenv.contract.protocol import Channel, Command, Printed, RepeatedStep, WorkerSpec


class DummyBackend(InProcessBackend):
    """A backend with one host in the caller's thread, whatever the number of cores."""

    def plan_workers(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> int:  # noqa: D102 (see Backend)
        return 1

    def launch(self, specs: Sequence[WorkerSpec]) -> list[Channel]:  # noqa: D102 (see Backend)
        return [CallerChannel(spec) for spec in specs]

    def wait(self, channels: Sequence[Any], timeout: float | None, wanted: int = 1) -> Sequence[Any]:
        """Execute the pending commands instead of waiting.

        ``timeout`` has no effect, because the caller's thread is busy until the commands are done.
        """
        return [channel for channel in channels if channel.advance()]

    def prepare_step(self, commands: Sequence[tuple[Any, Command]]) -> RepeatedStep | None:  # noqa: D102 (see Backend)
        return CallerStep.of(*commands[0])

    def close(self, channels: Sequence[Channel], timeout: float) -> Sequence[Printed]:  # noqa: D102 (see Backend)
        for channel in channels:
            channel.kill()
        return ()
