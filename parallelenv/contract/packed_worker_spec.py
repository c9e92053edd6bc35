"""The data that a worker needs to start, in a form that can be sent to another process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import parallelenv
from parallelenv.contract.batch import Array
from parallelenv.contract.env_specs import EnvFactory, PackedSource, pack_factories, registered_by_user
from parallelenv.contract.protocol import WorkerSpec
from parallelenv.errors import WorkerStartError

_PLAIN_FIELDS = [field.name for field in fields(WorkerSpec) if field.name not in ("envs", "shared")]


def environment_variables() -> dict[str, str]:
    """Return the environment variables of this process, even if another thread changes them meanwhile."""
    return {name: value for name in os.environ if (value := os.environ.get(name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSpec(WorkerSpec):
    """A `WorkerSpec` in the form that is sent to a worker, with pickled envs."""

    #: The caller's environment variables, because those of a fork server may be outdated. If empty, the worker keeps
    #: its own.
    environment: dict[str, str]
    path: tuple[str, ...]  #: The caller's ``sys.path``, of which Ray workers know only a part.
    registered: dict[str, bytes]  #: Env specs that the caller registered.
    shared: Any = ()  #: The shared arrays, or the data that a worker needs to find them.

    @classmethod
    def pack(
        cls,
        specs: Sequence[WorkerSpec],
        caller: PackageVersion | None = None,
        environment: Mapping[str, str] | None = None,
        shared: object = None,
    ) -> list[PackedSpec]:
        """Return specs in the form in which workers get them; raise an `UnpicklableError` if an env cannot be pickled.

        In ``specs``, too, pickles replace live envs. A worker that is started later thus gets these envs as they are
        now, even if the user changes them. Env fns are not replaced, because their pickles may be large.

        ``caller`` is the version and folder of this package in the caller's process; the default describes the copy
        that runs in this process. ``environment`` and ``shared`` become the fields of the same name; by default, the
        spec contains this process's environment variables, and keeps its own shared arrays.
        """
        registered, caller = registered_by_user(), caller or package_version()
        environment = environment_variables() if environment is None else environment
        envs = [env for spec in specs for env in spec.envs]
        new = [env for env in envs if not (isinstance(env.source, PackedSource) and env.source.caller == caller)]
        sources = {env.env_id: env.source for env in envs}
        for env, packed in zip(new, pack_factories(new), strict=True):
            sources[env.env_id] = PackedSource(packed, env.env_id, env.is_live, caller)
            if env.is_live:
                env.source, env.is_live = sources[env.env_id], False
        return [
            cls(
                **{name: getattr(spec, name) for name in _PLAIN_FIELDS},
                envs=tuple(EnvFactory(env.env_id, sources[env.env_id], is_live=False) for env in spec.envs),
                environment=dict(environment),
                path=tuple(sys.path),
                registered=registered,
                shared=dict(spec.shared) if shared is None else shared,
            )
            for spec in specs
        ]

    def unpack(self, shared: Mapping[str, Array]) -> WorkerSpec:
        """Return a plain `WorkerSpec` whose shared arrays are ``shared``. An env is unpickled each time it is built."""
        return WorkerSpec(**{name: getattr(self, name) for name in _PLAIN_FIELDS}, envs=self.envs, shared=shared)


class PackageVersion(NamedTuple):
    """Identifies a copy of this package. The folder is empty on Ray, where folders cannot be compared."""

    version: str
    folder: str

    def check(self) -> None:
        """Raise a `WorkerStartError` unless this process runs the same copy of the package as the caller."""
        ours = package_version()
        if not self.folder and self.version != ours.version:
            raise WorkerStartError(
                f"A worker has version {ours.version} of parallelenv, in {ours.folder}, but the caller has "
                f"{self.version}. Install the same version on all machines."
            )
        if self.folder and self != ours:
            raise WorkerStartError(
                f"A worker runs a different copy of parallelenv from the caller: version {ours.version} in "
                f"{ours.folder}, not {self.version} in {self.folder}. sys.path has changed since the caller imported "
                f"parallelenv. Set PYTHONPATH={os.path.dirname(self.folder)} before Python starts."
            )


def package_version() -> PackageVersion:
    """Return the version and folder of the copy of this package that runs in this process."""
    return PackageVersion(parallelenv.__version__, os.path.dirname(os.path.realpath(parallelenv.__file__)))
