"""Starts a cluster of two nodes on this machine and compares the modes on it.

Usage: python -m tests.cluster [arguments of parallelenv compare]
"""

from __future__ import annotations

import contextlib
import logging
import sys

from parallelenv.__main__ import main
from parallelenv.backends._ray_cluster import cores_of_nodes

from .nodes import Nodes

_DEFAULTS = ("CartPole-v1", "--num-envs", "16")


def demo() -> int:
    import ray

    with contextlib.closing(Nodes()) as nodes:
        nodes.renew()
        ray.init(address=nodes.cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        print(f"A Ray cluster of a head and {len(cores_of_nodes())} nodes with 2 cores each.")
        return main(["compare", *(sys.argv[1:] or _DEFAULTS)])


if __name__ == "__main__":
    sys.exit(demo())
