"""What a worker needs to start, in a form that can be sent to another process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import parallelenv
from parallelenv.contract.batch import Array
from parallelenv.contract.copying import loads
from parallelenv.contract.env_specs import EnvFactory, PackedSource, pack_factories, registered_by_user
from parallelenv.contract.protocol import PoolPosition, WorkerSettings, WorkerSpec
from parallelenv.errors import WorkerStartError


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """A `WorkerSpec` in the form that is sent to a worker.

    Attributes:
        env_ids: The envs.
        envs: Their sources, pickled.
        live: Which of the sources are envs themselves.
        settings: See `WorkerSpec`.
        num_cpus: See `WorkerSpec`.
        environment: The caller's environment variables: those of a fork server may be outdated. If empty, the worker
            keeps its own.
        path: The caller's ``sys.path``: Ray workers know only a part of it.
        registered: Env specs that the caller registered.
        caller: Version and folder of this package in the caller.
        place: See `WorkerSpec`.
        shared: The shared arrays, or what a worker needs to find them.
    """

    env_ids: tuple[int, ...]
    envs: tuple[bytes, ...]
    live: tuple[bool, ...]
    settings: WorkerSettings
    num_cpus: int
    environment: dict[str, str]
    path: tuple[str, ...]
    registered: dict[str, bytes]
    caller: PackageVersion
    place: PoolPosition
    shared: Any = ()

    @classmethod
    def pack(
        cls,
        specs: Sequence[WorkerSpec],
        caller: PackageVersion | None = None,
        environment: Mapping[str, str] = os.environ,
        shared: Any = None,
    ) -> list[PackedSpec]:
        """Return specs in the form to send.

        Args:
            specs: The specs.
            caller: Default: version and folder of the copy that runs here.
            environment: See `PackedSpec`.
            shared: See `PackedSpec`; by default the arrays of the specs.

        Raises:
            UnpicklableError: If an env cannot be pickled.
        """
        registered = registered_by_user()
        return [
            cls(
                spec.env_ids,
                tuple(pack_factories(spec.envs)),
                tuple(env.is_live for env in spec.envs),
                spec.settings,
                spec.num_cpus,
                dict(environment),
                tuple(sys.path),
                registered,
                caller or package_version(),
                spec.place,
                dict(spec.shared) if shared is None else shared,
            )
            for spec in specs
        ]

    def unpack(self, shared: Mapping[str, Array]) -> WorkerSpec:
        """Return the spec, with the shared arrays of this process; each env is unpickled whenever it is built."""
        envs = tuple(
            EnvFactory(env_id, _Packed(packed, env_id, is_live, self.caller), is_live=False)
            for env_id, packed, is_live in zip(self.env_ids, self.envs, self.live, strict=True)
        )
        return WorkerSpec(self.env_ids, envs, self.num_cpus, self.settings, self.place, shared)


@dataclass(frozen=True, slots=True)
class _Packed(PackedSource):
    """An env fn that unpickles an env, or an env fn."""

    packed: bytes
    env_id: int
    is_live: bool
    caller: PackageVersion

    def __call__(self) -> Any:
        _refuse_other_copy(self.caller)
        return EnvFactory(self.env_id, loads(self.packed), self.is_live).build()

    def prepare(self) -> None:
        """Import what the env needs. A live env is not unpickled, because that would make it."""
        if not self.is_live:
            EnvFactory(self.env_id, loads(self.packed), is_live=False).prepare()


class PackageVersion(NamedTuple):
    """Version and folder of a copy of this package.

    Attributes:
        version: Its version.
        folder: Its folder; empty if that cannot be compared, as on other machines.
    """

    version: str
    folder: str


def package_version() -> PackageVersion:
    """Return version and folder of the copy that runs here."""
    return PackageVersion(parallelenv.__version__, os.path.dirname(os.path.realpath(parallelenv.__file__)))


def _refuse_other_copy(caller: PackageVersion) -> None:
    """Raise a `WorkerStartError` if the caller runs another copy than this process."""
    ours = package_version()
    if not caller.folder:
        if caller.version != ours.version:
            raise WorkerStartError(
                f"A worker has version {ours.version} of parallelenv, in {ours.folder}, but the caller has "
                f"{caller.version}. Install the same version on all machines."
            )
    elif caller != ours:
        raise WorkerStartError(
            f"A worker runs another copy of parallelenv than the caller: version {ours.version} in {ours.folder}, not "
            f"{caller.version} in {caller.folder}. sys.path has changed since the caller imported parallelenv. Set "
            f"PYTHONPATH={os.path.dirname(caller.folder)} before Python starts."
        )
