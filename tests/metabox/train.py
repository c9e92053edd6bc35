"""One run of MetaBox in a process of its own: ``python -m tests.metabox.train NAME MODE own|ours OUT``.

NAME is a trainer. The weights are written to OUT. MetaBox is used as it is installed; with ``ours`` the name
``ParallelEnv`` in its modules is ours, as if the line that imports it had been changed.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from modes import THREADS

NUM_ENVS = 4
BUDGET = 1000  # evaluations of an episode: 20,000 are usual, and take minutes
BUDGETS = {"DEDDQN": 300}  # it learns after each of them
DIFFERENTIATED = ("RNNOPT", "GLHF", "B2OPT")
"""Their gradients go through the envs, so their problems are in torch."""
UNSEEDED = ("RLDAS", "SYMBOL", "RLHPSDE")
"""Their envs also draw from NumPy's generator of the process (`scipy.stats.cauchy.rvs`): no env's seed reaches it."""


def main(name: str, mode: str, whose: str, out: str) -> None:
    """Train, and write the weights to a file."""
    import metaevobox
    import metaevobox.baseline.metabbo as agents
    import metaevobox.environment.optimizer as optimizers
    from metaevobox.environment.problem.utils import construct_problem_set

    if mode == THREADS and name in (*DIFFERENTIATED, *UNSEEDED):
        # On several threads at once envs draw from the generators of the process, and add gradients up, in any order.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if whose == "ours":
        swap_import()
    config = metaevobox.Config(
        {
            "train_problem": "bbob-torch-10D" if name in DIFFERENTIATED else "bbob-10D",
            "user_train_problem_list": [1, 3, 8, 15],
            "user_test_problem_list": [6, 20],
            "train_batch_size": NUM_ENVS,
            "train_parallel_mode": mode,
            "train_mode": "multi",
            "max_epoch": 1,
            "n_checkpoint": 1,
            "no_tb": True,
        }
    )
    config.maxFEs = BUDGETS.get(name, BUDGET)
    config.log_interval = max(1, config.maxFEs // config.n_logpoint)
    config, datasets = construct_problem_set(config)
    agent = getattr(agents, name)(config)
    optimizer = getattr(optimizers, f"{name}_Optimizer")(config)
    if hasattr(agent, "warm_up_size"):
        agent.warm_up_size = min(agent.warm_up_size, 128)  # transitions before it learns: 10,000 are usual
    random.seed(0)  # it draws transitions to replay from this generator, but does not seed it
    before = dict(learned(agent))
    began = time.perf_counter()
    metaevobox.Trainer(config, agent, optimizer, datasets).train()
    seconds = time.perf_counter() - began
    after = dict(learned(agent))
    moved = sum(key not in before or not same(before[key], value) for key, value in after.items())
    with open(out, "wb") as file:
        np.savez(file, **after)
    print("\nRESULT", json.dumps({"moved": moved, "took": f"{seconds:.1f} s"}))


def swap_import() -> None:
    """Give every module of MetaBox our class where it has imported its own."""
    import parallelenv

    own = importlib.import_module("metaevobox.environment.parallelenv.parallelenv").ParallelEnv
    for name, module in list(sys.modules.items()):
        if name.startswith("metaevobox") and getattr(module, "ParallelEnv", None) is own:
            module.ParallelEnv = parallelenv.ParallelEnv  # type: ignore[attr-defined]


def learned(agent: Any) -> Iterator[tuple[str, Any]]:
    """Yield the weights of an agent's modules, and other arrays that it keeps, by name."""
    import torch

    for name, value in vars(agent).items():
        if isinstance(value, torch.nn.Module):
            for key, weight in value.state_dict().items():
                yield f"{name}.{key}", weight.detach().cpu().numpy().copy()
        elif isinstance(value, torch.Tensor):
            yield name, value.detach().cpu().numpy().copy()
        elif isinstance(value, np.ndarray) and value.dtype != object:
            yield name, value.copy()


def same(one: Any, other: Any) -> bool:
    """Return whether two arrays are equal bit for bit."""
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


if __name__ == "__main__":
    given, sys.argv[1:] = sys.argv[1:], []  # which MetaBox would read
    main(*given)
