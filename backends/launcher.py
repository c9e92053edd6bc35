"""MPI's launchers, which tell by environment variables to whom a process belongs."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_PREFIXES = (
    "OMPI_",  # Open MPI
    "PMI_",  # MPICH, Intel MPI, Cray, Slurm
    "PMIX_",  # Open MPI from 4 on, Slurm
    "PRTE_",  # Open MPI's own runtime, from 5 on
    "HYDI_",  # Hydra, the launcher of MPICH and Intel MPI
    "MPI_LOCAL",  # likewise: MPI_LOCALRANKID, MPI_LOCALNRANKS
    "MV2_COMM_WORLD_",  # MVAPICH
    "PALS_",  # Cray
)


def forget_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove what says that this process is the one that an MPI launcher has started.

    A worker is not, but has the variables of the caller, which may be. An env that imports `mpi4py` would then take
    the caller's place in its job, and hang or end it. It is done in the worker, before there are envs: the caller's
    variables are not touched, not for a moment, for other threads may be reading them.
    """
    for name in [name for name in environment if name.startswith(_PREFIXES)]:
        del environment[name]
