"""All envs of one `ParallelEnv`, wherever they are: operations are split, numbered, sent and gathered here."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from parallelenv.contract.batch import Array, Layout, pick
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.env_specs import EnvRecipe, refuse_live, refuse_shared
from parallelenv.contract.failures import Failure
from parallelenv.contract.messages import list_ids
from parallelenv.contract.process_info import Seat
from parallelenv.contract.protocol import NOTED, Backend, Command, EnvFacts, Place, Settings
from parallelenv.contract.shared_arrays import NOTHING_SHARED, share
from parallelenv.contract.spaces import Spaces, common_space, with_spaces
from parallelenv.engine.output import show
from parallelenv.engine.tickets import Link, Request, name_envs, split_further, spread
from parallelenv.engine.utilisation import Hours
from parallelenv.engine.workers import CLOSE_TIMEOUT, Announcement, Hosts, Listener
from parallelenv.errors import ArgumentError, WorkerTimeoutError

NO_FAILURES: Mapping[int, Failure] = MappingProxyType({})


class Pool(Hosts):
    """Executes operations on envs, wherever they are.

    Args:
        backend: Where the hosts live.
        recipes: One per env, in env id order; ids are consecutive.
        num_cpus: Cores the envs may use; ``None`` means all usable ones.
        num_gpus: GPUs to share out, for backends that reserve them.
        silence_warnings: Whether worker processes ignore warnings.
        timeout: Seconds that a call may take; ``None`` means for ever.
        listener: Told what envs print in workers, in the thread of the call that is running.
        place: Where this pool stands among others; ``None`` if it stands alone.
        seed: As in `Place`, of a pool that stands alone.
        shared: Arrays that all envs are to have.
        seed_globals: As in `Settings`.

    Attributes:
        facts: What is known of each env, in env id order, since it was first built.
        seats: Where each env lives now.
    """

    facts: list[EnvFacts]
    seats: dict[int, Seat]

    def __init__(
        self,
        backend: Backend,
        recipes: Sequence[EnvRecipe],
        *,
        num_cpus: int | None = None,
        num_gpus: float = 0,
        silence_warnings: bool = True,
        timeout: float | None = None,
        listener: Listener = show,
        place: Place | None = None,
        seed: int | None = None,
        shared: Mapping[str, Array] = NOTHING_SHARED,
        seed_globals: bool = False,
    ) -> None:
        self._has_spaces = False  # else every env is asked for its own
        self._timeout: float | None = None  # building envs may take as long as it takes
        self._call_timeout = timeout
        self._plain_numbers = itertools.count(1)
        self._numbers: Iterator[int] = self._plain_numbers
        self.seats = {}
        self.is_watched = False
        self.waits_by: str | None = None
        plan = backend.plan(len(recipes), num_cpus, num_gpus)
        if seed_globals and backend.uses_live_envs and len(plan.cpus) > 1:
            raise ArgumentError(
                "seed_globals=True gives each env its own state of the generators of random, numpy.random and torch, "
                f"which all threads of a process share: {len(plan.cpus)} threads cannot step envs side by side then. "
                "Give num_cpus=1, or para_mode='subproc'."
            )
        settings = Settings(silence_warnings, max(1, usable_cores() // sum(plan.cpus)), seed_globals)
        place = place or Place(num_workers=0, seed=seed)
        at_hosts = share(backend, shared) if shared else shared
        super().__init__(backend, spread(recipes, plan, settings, place, at_hosts), listener)

    def build(self, keeps_ended: bool, spaces: Spaces | None = None) -> None:
        """Build all envs and the batch. The pool is closed if that fails.

        Args:
            keeps_ended: Whether the batch keeps last states of ended episodes.
            spaces: Observation and action space of every env; ``None``: those that envs declare.

        Raises:
            BaseException: What an env's constructor raised.
        """
        try:
            self._has_spaces = spaces is not None
            facts = self.ask("build", self.env_ids, common=self._has_spaces).values
            refuse_shared(facts)
            self.facts = with_spaces([facts[env_id] for env_id in self.env_ids], spaces)
            observation_space = common_space(one.observation_space for one in self.facts)
            action_space = common_space(one.action_space for one in self.facts)
            self.attach(Layout(observation_space, action_space, self._first, len(self.facts), keeps_ended))
        except BaseException as error:
            self.close(0.0 if isinstance(error, KeyboardInterrupt) else CLOSE_TIMEOUT)
            raise
        self._timeout = self._call_timeout
        self._note_built(self._links)
        self.seats.update({env_id: one.seat for env_id, one in facts.items()})
        self.hours = Hours()

    def _note_built(self, links: Iterable[Link]) -> None:
        for link in links:
            link.has_built = link.has_built or link.death is None

    def attach(self, layout: Layout) -> None:
        """Allocate the batch and hand it to all hosts."""
        self.adopt(self._backend.allocate(layout))

    def rearrange(self, layout: Layout) -> None:
        """Replace the batch by one of another layout. All states are lost with the old one.

        Raises:
            WorkerTimeoutError: If hosts do not come to the end, within the pool's timeout, of what they are at, and
                would answer in the old layout. Nothing was changed.
        """
        self._let_finish(self._links, self._timeout)
        busy = [env_id for link in self._links if link.in_flight for env_id in link.recipe.env_ids]
        if busy:
            raise self.late(busy, self._timeout, "attach")
        self.attach(layout)

    def number_by(self, choose: Callable[[Iterator[int]], Iterator[int]] | None) -> None:
        """Let an iterator over numbers of commands decide which of them are `NOTED`; ``None``: none is."""
        self._numbers = self._plain_numbers if choose is None else choose(self._plain_numbers)

    @property
    def num_hosts(self) -> int:
        """Number of workers: of processes, threads or actors that step envs."""
        return sum(min(link.recipe.num_cpus, len(link.recipe.env_ids)) for link in self._links)

    @property
    def keeps_graphs(self) -> bool:
        """Whether actions reach the envs with what torch knows of how they were computed: nothing travels."""
        return self._backend.uses_live_envs

    @property
    def placement(self) -> str:
        """How hosts are reached, empty if there is nothing to say."""
        return self._backend.placement

    @property
    def lone_host(self) -> Any:
        """The only host, if it works in this very thread: to call it takes no message. ``None`` otherwise."""
        channel: Any = self._links[0].channel
        return getattr(channel, "host", None) if len(self._links) == 1 and channel.in_caller else None

    def envs_here(self) -> tuple[Any, ...] | None:
        """Return the envs themselves, in env id order, if they live in this process."""
        hosts: list[Any] = [getattr(link.channel, "host", None) for link in self._links]
        return None if None in hosts else tuple(env for host in hosts for env in host.envs)

    # ---------------------------------------------------------------- commands

    def ask(self, name: str, env_ids: Sequence[int], each: Sequence[Any] | None = None, common: Any = None) -> Request:
        """Execute an operation on envs, wait for all of them, and raise what went wrong.

        Args:
            name: Operation of `backends.host.Host`.
            env_ids: The envs, in any order.
            each: One argument per env, in the order of ``env_ids``, or ``None``.
            common: Further arguments, the same for every env.

        Returns:
            The finished request, with ``values`` and without ``failures``.

        Raises:
            BaseException: What an env raised; ``error.partial`` has the others' values.
            WorkerDiedError: If a worker is or was found dead.
            WorkerTimeoutError: If not all answered within the pool's timeout; answers that
                come later are dropped.
        """
        request = self.try_asking(name, env_ids, each, common)
        request.raise_failures()
        return request

    def try_asking(self, name: str, env_ids: Sequence[int], each: Sequence[Any] | None, common: Any = None) -> Request:
        """Do as `ask`, but leave the failures of envs in the request."""
        request = self.post(name, env_ids, each, common)
        self.wait(request, self._timeout)
        return request

    def post(
        self,
        name: str,
        env_ids: Sequence[int],
        each: Sequence[Any] | None = None,
        common: Any = None,
        announce: Announcement = lambda _: None,
        failed: Mapping[int, Failure] = NO_FAILURES,
        *,
        flies: bool = False,
    ) -> Request:
        """Send an operation to the hosts and return without waiting.

        Args:
            name: As in `ask`.
            env_ids: As in `ask`.
            each: As in `ask`.
            common: As in `ask`.
            announce: Called with the request when nothing can go wrong any more, just before
                the first command leaves.
            failed: Why some of the envs cannot be asked: the answer for these.
            flies: Whether the caller takes the answers as they come, rather than wait for all of them.

        Raises:
            WorkerDiedError: If a worker is known to be dead, unless its envs are to be built; nothing was sent.
            UnpicklableError: If an argument cannot be copied; nothing was sent.
        """
        request = Request(tuple(env_ids), name)
        if failed:
            request.failures.update(failed)
            asked = [position for position, env_id in enumerate(env_ids) if env_id not in failed]
            env_ids = [env_ids[position] for position in asked]
            each = None if each is None else pick(each, asked)
        if self._lost and name != "build":
            self.refuse_dead(env_ids)
        packed = []
        parts = self._split(env_ids)
        for link, part, positions in split_further(parts) if flies else parts:
            arguments = None if each is None else pick(each, positions)
            command = Command(next(self._numbers), name, part, arguments, common)
            packed.append((link, command, link.channel.pack(command)))
        self._dispatch(request, packed, announce)
        return request

    # ---------------------------------------------------------------- answers

    def wait(self, request: Request, timeout: float | None) -> None:
        """Wait until all hosts have answered a request.

        Raises:
            WorkerTimeoutError: If they have not within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while request.pending:
            if not self.pump(deadline):
                raise self.late(request.running, timeout, request.operation)

    def wait_or_give_up(self, request: Request) -> bool:
        """Wait for a request as long as a call may take. Being late is then a failure of envs like others.

        Returns:
            Whether all answered in time.
        """
        try:
            self.wait(request, self._timeout)
        except WorkerTimeoutError as late:
            self.give_up(request, late)
            return False
        return True

    def ways_to_wait(self, num_envs: int) -> str:
        """Return the call by which users wait on for the steps of so many envs, for messages."""
        return self.waits_by or f"recv(min_envs={num_envs})"

    def late(self, env_ids: Sequence[int], timeout: float | None, operation: str) -> WorkerTimeoutError:
        """Return the error that says who did not answer in time, and what can be done about it."""
        ids = tuple(sorted(env_ids))
        ways = {
            "step": f"Wait on with {self.ways_to_wait(len(ids))}, give a longer timeout, or rebuild with "
            f"restart({list_ids(ids)}).",
            "rollout": f"The steps since the last chunk are lost: begin anew with reset({list_ids(ids)}), after "
            f"restart({list_ids(ids)}) if the env hangs, and with a longer timeout if it is only slow.",
            "run_episodes": "All that played need a reset. Play again with a longer timeout, after "
            f"restart({list_ids(ids)}) if the env hangs.",
        }
        other = f"Give a longer timeout, or rebuild with restart({list_ids(ids)})."
        way_out = ways.get(operation, other)
        return WorkerTimeoutError(f"{name_envs(ids)} did not answer within {timeout} s. {way_out}", ids)

    def forward(self, command: Command) -> Request:
        """Execute a command as a host would: without raising what goes wrong in an env."""
        if command.name == "build":
            self._has_spaces = bool(command.common)
            return self.rebuild(command.env_ids)
        request = self.begin(command)
        self.wait(request, None)
        return request

    def begin(self, command: Command) -> Request:
        """Begin to execute a command that builds nothing, as `forward` does."""
        if command.name in ("watch", "unwatch"):
            self.is_watched = command.name == "watch"
        self.number_by(functools.partial(map, NOTED.__or__) if command.number >= NOTED else None)
        dead = [env_id for env_id in command.env_ids if self._link(env_id).death] if self._lost else ()
        failed = {env_id: Failure(self._link(env_id).obituary((env_id,)), env_id, "") for env_id in dead}
        return self.post(command.name, command.env_ids, command.each, command.common, failed=failed)

    def rebuild(self, env_ids: Sequence[int], announce: Callable[[Sequence[int]], None] = lambda _: None) -> Request:
        """Build envs from their recipes.

        A host that is dead, was given up, or is busy with one of them is replaced, with all its envs. What
        its other envs have under way is waited for; if that takes longer than the pool's timeout, it is replaced too.

        Args:
            env_ids: The envs.
            announce: Called with the ids of all envs that are built, when nobody can break that off any more, and
                again if there turn out to be more of them behind a host. `obituaries` still has those that were dead.

        Returns:
            The finished request. It concerns the envs asked for and the others of hosts that were
            replaced, here or behind a host.

        Raises:
            InvalidEnvError: If one was given as a live instance that never left this process;
                nothing was touched.
        """
        self._refuse_live(env_ids)
        links = dict.fromkeys(map(self._link, env_ids))
        self._let_finish([link for link in links if not link.is_stuck_for(env_ids)], self._timeout)
        broken = [link for link in links if link.death or link.in_flight]
        rebuilt = sorted({*env_ids, *self._lost_with(env_ids)}.union(*(link.recipe.env_ids for link in broken)))
        self._refuse_live(rebuilt)
        for link in broken:
            self._replace(link)

        def note(known: Collection[int]) -> None:
            announce(tuple(known))
            for env_id in known:
                self._lost.pop(env_id, None)

        request = self.post("build", rebuilt, common=self._has_spaces, announce=lambda _: note(rebuilt))
        self.wait(request, None)
        note(request.values.keys() - rebuilt)
        self._note_built(links)
        self.seats.update({env_id: one.seat for env_id, one in request.values.items()})
        if self.is_watched:
            self._watch(broken)
        return request

    def _watch(self, links: Iterable[Link]) -> None:
        """Let hosts that were replaced note what their envs do, as the others do."""
        env_ids = [env_id for link in links for env_id in link.recipe.env_ids if env_id not in self._lost]
        if env_ids:
            self.wait(self.post("watch", env_ids), None)

    def _lost_with(self, env_ids: Sequence[int]) -> Iterable[int]:
        """Return the envs that are known to have lost the same workers, behind a host, as these."""
        workers = {(self._link(env_id), self._lost[env_id].pid) for env_id in env_ids if env_id in self._lost}
        return [env_id for env_id, error in self._lost.items() if (self._link(env_id), error.pid) in workers]

    def _refuse_live(self, env_ids: Sequence[int]) -> None:
        if self._backend.uses_live_envs:
            links = [(env_id, self._link(env_id).recipe) for env_id in env_ids]
            refuse_live(recipe.envs[env_id - recipe.env_ids[0]] for env_id, recipe in links)
