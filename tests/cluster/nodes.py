"""A Ray cluster of several nodes, all on this machine."""

from __future__ import annotations

import time
from typing import Any

from parallelenv.backends._ray_cluster import resources


class Nodes:
    """A cluster: a head without cores, and the nodes that are added.

    The processes of each node find its name in the environment variable ``NODE``.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # Ray takes 14 s to notice that a node has died, with the usual settings.
        health = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 200,
            "health_check_timeout_ms": 1000,
            "health_check_failure_threshold": 2,
        }
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": health}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}

    def add(self, name: str, num_cpus: int, **resources: Any) -> None:
        self._nodes[name] = self.cluster.add_node(num_cpus=num_cpus, env_vars={"NODE": name}, **resources)
        self.cluster.wait_for_nodes()

    def remove(self, name: str) -> None:
        """Kill a node, as if its machine were switched off."""
        self.cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def renew(self) -> None:
        """Reset the cluster to the nodes ``a`` and ``b`` with two cores each, and wait until Ray has noticed it."""
        for name in self._nodes.keys() - {"a", "b"}:
            self.remove(name)
        for name in ("a", "b"):
            if name not in self._nodes:
                self.add(name, 2)
        self._await_free_cores(4)

    def _await_free_cores(self, number: int) -> None:
        import ray

        deadline = time.monotonic() + 30
        while ray.is_initialized() and time.monotonic() < deadline:
            if resources("cluster_resources").get("CPU") == resources("available_resources").get("CPU") == number:
                return
            time.sleep(0.1)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()
