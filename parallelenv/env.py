"""The class that users meet: it checks arguments, asks the pool, and shapes the answer."""

from __future__ import annotations

import _thread
import atexit
import functools
import inspect
import multiprocessing.util  # noqa: F401 (its exit handler joins workers: ours, registered later, runs before it)
import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, overload

import gymnasium

from parallelenv import registry
from parallelenv.contract import arguments, env_specs, migration_hints
from parallelenv.contract.env_specs import EnvRecipe
from parallelenv.contract.messages import count
from parallelenv.contract.protocol import Backend
from parallelenv.contract.shared_arrays import check_shared
from parallelenv.engine import cells
from parallelenv.engine.assemble import Align
from parallelenv.engine.done_policies import make_policy
from parallelenv.engine.engine import Sender
from parallelenv.engine.guard import exclusive
from parallelenv.engine.output import make_listener
from parallelenv.engine.pool import Pool
from parallelenv.engine.recovery import Recovery
from parallelenv.engine.workers import CLOSE_TIMEOUT
from parallelenv.errors import ArgumentError, IdRangeError
from parallelenv.long_runs import LongRuns
from parallelenv.registry import ParaMode
from parallelenv.results import StepBatch, StepResult
from parallelenv.rollouts.rollout import Roller

if TYPE_CHECKING:
    from parallelenv.tasks.task_pool import TaskPool

OnFailure = Literal["raise", "restart"]

_MOMENT = 0.05
"""Seconds in which a finalizer has returned."""


class ParallelEnv(LongRuns):
    """Runs a list of environments side by side; one word chooses how.

    Env ids are positions in the list, ``0 .. n-1``, and never change. Wherever an ``id`` is
    taken it is ``None`` (every env that is not paused), an int, a list, tuple or array of
    ints, a slice, or a bool mask of length n; answers come in the order given.

    Same seeds and actions give identical results in every mode, with any number of workers.

    Args:
        envs: Envs, env fns (callables without arguments that make one), registered ids or
            `EnvSpec` objects, freely mixed. Env fns are called where the env will live. Objects
            with ``reset()`` and the old 4-tuple ``step()`` are envs too; a `gymnasium.Env` that has these, or whose
            ``reset`` takes no ``seed`` or ``options``, is used as it was meant, with an `OldApiWarning`. Objects
            without them are there for calls and attributes.
        para_mode: ``"dummy"`` (a loop), ``"thread"``, ``"subproc"``, ``"ray"``, ``"ray-subproc"``, a
            word that another package adds, a backend class, or ``"auto"``: what `recommend` says.
        asynchronous: What happens when an episode ends. ``None``: the end of one is the end of
            all; until their reset they answer ``(None, None, True, {})``. ``"idle"``: that env
            answers so, the others go on. ``"restart"``: it is reset within the same step and
            ``info["ended_state"]`` is its last state. ``"continue"``: it is stepped on.
        num_cpus: Cores the envs may use; there are ``min(num_cpus, n)`` workers.
            ``None`` or 0: all usable ones. More than there are is useful for envs that wait.
        num_gpus: GPUs shared out evenly over Ray workers; fractions are allowed.
        no_warning: Whether warnings raised in worker processes are dropped there.
        timeout: Seconds a call may take before it raises `WorkerTimeoutError`; ``None``: for ever.
        on_failure: What happens if an env raises in a step, its worker dies, or a step takes longer
            than ``timeout``. ``"raise"``: the call raises. ``"restart"``: that env, and any that shared a
            dead worker with it, is rebuilt and reset, and counts as cut off: its state is the first of
            the new episode, its reward 0, it is done and truncated, ``info["failure"]`` is the
            exception, and ``info["ended_state"]``, with policy ``"restart"``, is ``None``. If it was seeded,
            its new seed follows from that.
        max_restarts: So often an env is restarted within ten minutes, each time after a longer pause,
            up to 5 s; the failure after that is raised.
        output: ``"show"``: what envs print in worker processes appears on ``sys.stdout`` during the call
            in which they print it, each line after ``[env 3]``. ``"quiet"``: it is dropped. Either way the
            last lines of a worker that dies are in the error. Envs in this process print as ever.
        copy: ``False`` lets ``step`` and ``reset`` answer states as read-only views that are
            valid until the next call.
        spaces: ``(observation_space, action_space)`` of every env, instead of what envs declare: for those that
            declare none, or declare them at a cost. No worker is asked for any. What does not fit them is an
            `EnvContractError` of the env that answers it, or an `ActionError`.
        keep: In a notebook, what a cell has made and left open is closed when that cell is run again and
            makes another one. ``True``: this one is not.
        seed: Of the first episodes, as by `seed`, and what `get_worker_info` says while envs are made.
        shared: Arrays by name that all envs read and nobody writes, copied once to where all workers have them:
            ``get_worker_info().shared["name"]``.
        seed_globals: Whether each env has its own state of the generators that a process shares: those of ``random``
            and ``numpy.random``, and torch's for the CPU from the first call after the env has imported torch. They are
            seeded as ``random.seed(s)`` and the like would when the env is reset with a seed ``s`` (before that with
            ``seed`` plus its id, or by the system), are in place while it is built, reset, stepped, or called, and
            saved by `save_state`; the process's own are put back as they were. So such envs give the same in every
            mode. It costs a command some 60 us and an env's step 15 us. Threads share generators: ``"thread"`` works
            with ``num_cpus=1``, and draw none yourself while a step is under way there.
        **backend_options: Options of the chosen backend.

    Raises:
        ArgumentError: If an argument has no usable value.
        InvalidEnvError: If an item of ``envs`` is no env, or comes twice.
        UnpicklableError: If an env cannot move to its worker.
        BaseException: What an env's constructor raised.
    """

    _live: ClassVar[weakref.WeakSet[ParallelEnv]] = weakref.WeakSet()

    def __init__(
        self,
        envs: Sequence[Any],
        para_mode: ParaMode = "dummy",
        asynchronous: Literal["idle", "restart", "continue"] | None = None,
        num_cpus: int | None = None,
        num_gpus: float = 0,
        no_warning: bool = True,
        *,
        timeout: float | None = None,
        on_failure: OnFailure = "raise",
        max_restarts: int = 10,
        output: Literal["show", "quiet"] = "show",
        copy: bool = True,
        spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]] | None = None,
        keep: bool = False,
        seed: int | None = None,
        shared: Mapping[str, Any] | None = None,
        seed_globals: bool = False,
        **backend_options: Any,
    ) -> None:
        super().__init__()
        self._is_closed = True  # until everything stands
        self._asynchronous, policy = asynchronous, make_policy(asynchronous)
        num_cpus = arguments.check_counts(num_cpus, num_gpus)
        arguments.check_flags(no_warning=no_warning, copy=copy, keep=keep, seed_globals=seed_globals)
        timeout, spaces = arguments.check_timeout(timeout), arguments.check_spaces(spaces)
        arguments.check_failure_handling(on_failure, max_restarts)
        for_envs = {"seed": arguments.check_base_seed(seed), "shared": check_shared(shared)}
        env_recipes = env_specs.make_recipes(envs)
        backend, num_cpus, chosen = registry.settle(
            para_mode, backend_options, env_recipes, num_cpus, num_gpus, spaces, for_envs, _ARGUMENTS
        )
        if on_failure == "restart" and backend.uses_live_envs:
            env_specs.refuse_live(env_recipes)
        self._para_mode = registry.word_of(chosen.mode if chosen else para_mode)
        self._recommendation = chosen
        cells.close_earlier()
        self._start(
            backend,
            env_recipes,
            policy.autoreset,
            spaces,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            silence_warnings=no_warning,
            timeout=timeout,
            listener=make_listener(output),
            seed_globals=seed_globals,
            **for_envs,
        )
        self._num_envs, self._everyone = len(env_recipes), self._pool.env_ids
        recovery = Recovery(self._pool, max_restarts) if on_failure == "restart" else None
        self._stepper = Sender(self._pool, policy, copy, timeout, recovery)
        self._roller = Roller(self._pool, policy, self._stepper, recovery, timeout)
        self._seeds = dict(enumerate(arguments.spread_seeds(seed, self._everyone, self._num_envs, whole=False)))
        self._is_closed = False
        self._live.add(self)
        if not keep:
            cells.note(self)

    def _start(
        self, backend: Backend, env_recipes: Sequence[EnvRecipe], keeps_ended: bool, spaces: Any, **pool_arguments: Any
    ) -> None:
        """Start hosts and build envs, or leave nothing behind."""
        try:
            self._pool = Pool(backend, env_recipes, **pool_arguments)
            self._finalizer = weakref.finalize(self, _close_dropped, self._pool)
            self._pool.build(keeps_ended, spaces)
        except BaseException:
            backend.close((), 0.0)  # whatever was begun, also where an interrupt came before the pool was known
            raise

    @classmethod
    def make(
        cls,
        id: str | gymnasium.envs.registration.EnvSpec,
        num_envs: int = 1,
        para_mode: ParaMode = "dummy",
        asynchronous: Literal["idle", "restart", "continue"] | None = None,
        num_cpus: int | None = None,
        num_gpus: float = 0,
        no_warning: bool = True,
        *,
        timeout: float | None = None,
        on_failure: OnFailure = "raise",
        max_restarts: int = 10,
        output: Literal["show", "quiet"] = "show",
        copy: bool = True,
        spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]] | None = None,
        keep: bool = False,
        seed: int | None = None,
        shared: Mapping[str, Any] | None = None,
        seed_globals: bool = False,
        backend_options: dict[str, Any] | None = None,
        **make_kwargs: Any,
    ) -> ParallelEnv:
        """Return a `ParallelEnv` of ``num_envs`` envs made by ``gymnasium.make(id, **make_kwargs)``.

        Raises:
            InvalidEnvError: If the id is not registered, or is no id.
            UnknownOptionError: If a further argument is an option of the mode, or one of ``make_vec_env`` or
                ``make_vec``, and none of the env.
        """
        arguments.check_positive("num_envs", num_envs)
        spec = env_specs.registered(id, make_kwargs, _MAKE_ARGUMENTS, registry.option_names(para_mode))
        env_fn = functools.partial(gymnasium.make, spec, **make_kwargs)
        return cls(
            [env_fn] * num_envs,
            para_mode,
            asynchronous,
            num_cpus,
            num_gpus,
            no_warning,
            timeout=timeout,
            on_failure=on_failure,
            max_restarts=max_restarts,
            output=output,
            copy=copy,
            spaces=spaces,
            keep=keep,
            seed=seed,
            shared=shared,
            seed_globals=seed_globals,
            **(backend_options or {}),
        )

    @classmethod
    def from_samplers(
        cls,
        make_sampler_fn: Callable[..., Any],
        sampler_fn_args: Sequence[Mapping[str, Any]],
        para_mode: ParaMode = "dummy",
        auto_resample_when_done: bool = True,
        **options: Any,
    ) -> TaskPool:
        """Return a `TaskPool`: a `ParallelEnv` whose envs are samplers of tasks, an episode of each a task.

        Args:
            make_sampler_fn: Returns a `TaskSampler`. It is called where the sampler will live.
            sampler_fn_args: Its keyword arguments: a dict per env. It gets copies.
            para_mode: As above.
            auto_resample_when_done: Whether a task that ends is followed by the sampler's next within the same step, as
                by ``asynchronous="restart"``. If not, it rests until `TaskPool.next_task`, as by ``"idle"``.
            **options: Everything else that the constructor takes, but for ``asynchronous``.

        Raises:
            ArgumentError: If ``sampler_fn_args`` is no sequence of dicts, or ``asynchronous`` is given.
            InvalidEnvError: If what was made is no sampler.
            BaseException: As the constructor.
        """
        from parallelenv.tasks.task_pool import TaskPool, make_recipes  # which is a subclass

        if "asynchronous" in options:
            raise ArgumentError(
                f"asynchronous={options['asynchronous']!r} was given to from_samplers(). Give auto_resample_when_done: "
                "True is 'restart', False is 'idle'. For another, make a TaskPool of env fns that return a TaskEnv."
            )
        arguments.check_flags(auto_resample_when_done=auto_resample_when_done)
        policy: Literal["idle", "restart"] = "restart" if auto_resample_when_done else "idle"
        return TaskPool(make_recipes(make_sampler_fn, sampler_fn_args), para_mode, policy, **options)

    @classmethod
    def replicate(
        cls, env: Any, num_envs: int, para_mode: ParaMode = "dummy", *args: Any, seed: int | None = None, **kwargs: Any
    ) -> ParallelEnv:
        """Return a `ParallelEnv` of so many copies of one env, which can be told apart.

        Each has a rank, its env id, and `get_worker_info` tells it that. If an env fn has parameters ``rank``,
        ``world_size`` or ``seed``, it is called with these: the rank, ``num_envs``, and ``seed`` plus the rank.

        Args:
            env: An env, which is copied, an env fn, a registered id or an `EnvSpec`.
            num_envs: So many.
            para_mode: As in the constructor.
            *args: Further arguments of the constructor.
            seed: As in the constructor.
            **kwargs: Further arguments of the constructor.

        Raises:
            InvalidEnvError: If it is no env.
            UnpicklableError: If it cannot be copied.
        """
        arguments.check_positive("num_envs", num_envs)
        copies = env_specs.replicate(env, num_envs, arguments.check_base_seed(seed))
        return cls(copies, para_mode, *args, seed=seed, **kwargs)

    # ---------------------------------------------------------------- episodes

    @exclusive
    def reset(self, id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        """Begin new episodes and return their first states, without the infos that Gymnasium's ``reset`` returns too.

        A step of these envs that is under way, or was interrupted, is dropped.

        Args:
            id: Which envs.
            seed: Int ``s``: env i gets ``s + i``. A list: one per env asked. ``None``: what
                `seed` left for each, else no seed.
            options: A dict for all, or a list with one per env asked.

        Returns:
            States as in `step`, in the order of ``id``. The infos are in `reset_infos`. (With two envs ``states, info =
            env.reset()`` would give the state of each; the ``reset`` of `to_gymnasium` returns a pair.) ``None`` in the
            place of an env that has no further episode: whose own ``reset`` raised `ExhaustedError`. It is `exhausted`
            then, and answers ``(None, None, True, {"exhausted": True})``, whatever ``asynchronous``, until a reset
            finds one.

        Raises:
            ArgumentError: If ``seed`` or ``options`` do not fit; nothing was reset.
            BaseException: What an env raised; ``error.partial`` has the states of the others, whose
                episodes have begun.
        """
        try:
            env_ids = self._ids(id)
        except IdRangeError as error:
            hint = f" For a seed write reset(seed={id})." if isinstance(id, int) and id >= 0 else ""
            raise IdRangeError(f"{error}{hint}") from None
        return self._end_reset(self._stepper.begin_reset(env_ids, self._beginnings(env_ids, seed, options)), None)

    @exclusive
    def seed(self, seed: int | Sequence[int | None]) -> list[int | None]:
        """Set the seeds that the next reset of each env uses.

        Args:
            seed: Int ``s``: env i gets ``s + i``. A list: one per env.

        Returns:
            The seed of each env, in env id order.

        Raises:
            ArgumentError: If it is neither.
        """
        seeds = arguments.spread_seeds(seed, self._everyone, self._num_envs, whole=True)
        self._seeds = dict(enumerate(seeds))
        return seeds

    @overload
    def step(self, action: Any, id: Any = None, align: Literal["item"] = "item") -> StepResult: ...
    @overload
    def step(self, action: Any, id: Any, align: Literal["batch"]) -> StepBatch: ...
    @overload
    def step(self, action: Any, id: Any = None, *, align: Literal["batch"]) -> StepBatch: ...
    @exclusive
    def step(self, action: Any, id: Any = None, align: Align = "item") -> StepResult | StepBatch:
        """Step envs and wait for all of them.

        Args:
            action: One action per env asked, in the order of ``id``: a batch as
                ``action_space.sample()`` gives it, or a list. Tensors that require grad, and torch modules whose
                parameters do, reach envs of this process as they are.
            id: Which envs.
            align: ``"item"`` or ``"batch"``.

        Returns:
            ``"item"``: a `StepResult`, which unpacks to ``states, rewards, dones, infos``.
            ``"batch"``: a list of ``(state, reward, done, info)``, one per env. Both carry
            ``terminated``, ``truncated`` and ``env_ids``.

        Raises:
            ResetNeededError: If an env was never reset.
            EnvBusyError: If a step of an env is under way or was interrupted.
            EnvPausedError: If ``id`` names a paused env.
            ActionError: If the actions do not fit, or carry gradients that cannot reach the envs. In these four
                cases nothing was stepped.
            BaseException: What an env raised; ``error.partial`` is the others' result.
            WorkerDiedError: If a worker died.
            WorkerTimeoutError: If the pool's timeout passed; `recv` waits on.
        """
        arguments.check_align(align)
        env_ids = self._stepper.episodes.unpaused if id is None else self._ids(id)
        return self._stepper.step(action, env_ids, align)

    # ---------------------------------------------------------------- as an object

    if not TYPE_CHECKING:  # to a type checker any name could be set

        def __setattr__(self, name: str, value: Any) -> None:
            """Set what is there to be set. A public name that is not would be accepted and do nothing.

            Raises:
                AbsentAttributeError: If there is none. A subclass may have what it likes.
            """
            known = getattr(ParallelEnv, name, None)
            is_fixed = known is None or (isinstance(known, property) and known.fset is None)
            if is_fixed and not name.startswith("_") and type(self) is ParallelEnv:
                raise migration_hints.not_to_set(self, name, name in inspect.signature(ParallelEnv).parameters)
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Return the number of envs."""
        return self._num_envs

    def __repr__(self) -> str:
        """Return one line; asks no worker."""
        if not hasattr(self, "_num_envs"):
            return "<parallelenv.ParallelEnv, not constructed>"
        chosen = self._recommendation
        mode = repr(self._para_mode) if chosen is None else f"{registry.AUTO!r} ({chosen.label})"
        parts = ["closed"] if self._is_closed else [count(self.num_workers, "worker"), self._pool.placement]
        return (
            f"<parallelenv.ParallelEnv of {count(self._num_envs, 'env')}, para_mode={mode}, "
            f"asynchronous={self._asynchronous!r}, {', '.join(filter(None, parts))}>"
        )

    # ---------------------------------------------------------------- the end

    def close(self, timeout: float | None = None) -> None:
        """Close all envs and end all workers. Whatever envs do, it does not raise; harmless when repeated.

        Args:
            timeout: Seconds that workers get to close their envs before they are ended; ``None``: 3.

        Raises:
            ArgumentError: If ``timeout`` is no such number; nothing was closed.
        """
        grace = arguments.check_grace(timeout, CLOSE_TIMEOUT)
        self._is_closed = True
        if hasattr(self, "_finalizer"):
            self._pool.close(grace)
            self._finalizer.detach()

    @classmethod
    def close_all(cls) -> None:
        """Close every `ParallelEnv` of this process that is still open.

        Raises:
            BaseExceptionGroup: What went wrong, when all have been closed.
        """
        errors: list[BaseException] = []
        for env in list(cls._live):
            try:
                env.close()
            except BaseException as error:  # noqa: BLE001 (raised below: it may not keep the others open)
                errors.append(error)
        if errors:
            raise BaseExceptionGroup("Some did not close well.", errors)

    def __enter__(self) -> Self:
        """Return itself; the end of the ``with`` block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()


_ARGUMENTS = tuple(inspect.signature(ParallelEnv).parameters)[:-1]  # the last one takes the options
_MAKE_ARGUMENTS = tuple(inspect.signature(ParallelEnv.make).parameters)[:-1]  # the last one takes those of the env


def _close_dropped(pool: Pool) -> None:
    """Close the pool of an object that nothing refers to any more.

    An interrupt meanwhile reaches the caller a moment later: Python drops what a finalizer raises.
    """
    try:
        pool.close()
    except KeyboardInterrupt:
        threading.Timer(_MOMENT, _interrupt_main).start()


def _interrupt_main() -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # also out of a wait
    else:
        _thread.interrupt_main()


atexit.register(ParallelEnv.close_all)
