"""The class `ParallelEnv`, which checks arguments and calls the engine."""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import multiprocessing.util  # noqa: F401 (its exit handler joins workers; ours, registered later, runs before that)
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, SupportsIndex, overload

import gymnasium
import numpy as np

from parallelenv import registry
from parallelenv.contract import arguments, env_specs
from parallelenv.contract.arguments import (
    MISSING,
    Ids,
    Options,
    Policy,
    Seeds,
    absent_attribute,
    check_shared,
    unsettable_attribute,
)
from parallelenv.contract.batch import Array, has_true
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.error_text import count, show
from parallelenv.contract.interrupts import DeferSignals, signal_behind
from parallelenv.contract.protocol import Lookup, MethodCall, WorkerSpec
from parallelenv.contract.spaces import Action, Info, Space, Spaces, State, batched
from parallelenv.contract.tracebacks import reports_failures, short_tracebacks, shortens_tracebacks, warn_user
from parallelenv.engine import cell_reruns
from parallelenv.engine.assemble import Align
from parallelenv.engine.done_policies import make_done_policy
from parallelenv.engine.engine import Engine
from parallelenv.engine.env_table import SavedState, check_saved
from parallelenv.engine.thread_guard import single_threaded
from parallelenv.engine.worker_output import make_listener
from parallelenv.engine.worker_pool import CLOSE_TIMEOUT
from parallelenv.errors import (
    AbsentAttributeWarning,
    ArgumentError,
    IdRangeError,
    MissingDependencyError,
    NothingInFlightError,
    UnpicklableError,
    WorkerTimeoutError,
)
from parallelenv.registry import ParaMode
from parallelenv.results import StepBatch, StepResult, refuse_pair
from parallelenv.rollouts.evaluation import Evaluation, evaluate
from parallelenv.rollouts.rollout import Rollout, RolloutLength
from parallelenv.rollouts.running_rollout import RunningRollout, run_batch_episodes
from parallelenv.rollouts.stream import CLOSE, RESET, TERMINATED, Signal, Stream

if TYPE_CHECKING:
    from parallelenv.adapters.gymnasium import GymnasiumVectorEnv
    from parallelenv.adapters.sb3 import SB3VecEnv
    from parallelenv.adapters.tianshou import TianshouVectorEnv
    from parallelenv.autotune.recommend import Recommendation
    from parallelenv.engine.tickets import Ticket
    from parallelenv.notebook.film import Film
    from parallelenv.notebook.profile import Recorder
    from parallelenv.tasks.task_pool import TaskPool


_Item = Literal["item"]
_Batch = Literal["batch"]


@short_tracebacks
class ParallelEnv:
    """Runs a list of environments in parallel; `para_mode` selects how.

    An env's id is its position in the list, ``0 .. n-1``, and never changes. An ``id`` argument is ``None`` (every env
    that is not paused, unless the method says otherwise), an int, a list, tuple or array of ints, a slice, or a bool
    mask of length n. Results are in the order of ``id``.

    The same seeds and actions give identical results in every mode, with any number of workers, if each env draws its
    random numbers from its own generator, which a reset seeds; otherwise see ``seed_globals``.

    Args:
        envs: Envs, env fns (callables without arguments that return an env), registered ids or `EnvSpec` objects, in
            any combination. Each env fn is called in the worker that will run its env. Objects with ``reset()`` and the
            old ``step()``, which returns four items, are accepted as well. A `gymnasium.Env` whose ``step`` returns
            four items, or whose ``reset`` lacks the parameter ``seed`` or ``options``, is used through the old API, and
            an `OldApiWarning` is issued. Objects that lack ``reset()`` or ``step()`` support only method calls and
            access to attributes. Each env inside a `gymnasium.vector.VectorEnv` has its own id, but all envs of one
            vector env step together.
        para_mode: ``"dummy"`` (a loop in the caller), ``"thread"``, ``"subproc"``, ``"ray"``, ``"ray-subproc"``, a mode
            that another package adds, a backend class, or ``"auto"``, which chooses a mode as `recommend` does, in a
            trial of about one second.
        asynchronous: The done policy: what happens when an episode ends. ``None``: when the episode of one env ends,
            those of all other envs end too; all envs then return ``(None, None, True, {})`` until they are reset.
            ``"idle"``: an env whose episode has ended returns ``(None, None, True, {})`` until it is reset; the other
            envs continue. ``"restart"``: the env is reset within the step that ends its episode, and
            ``info["ended_state"]`` is the last state of that episode. ``"continue"``: the env is still stepped.
        num_cpus: Number of cores that the envs may use; there are ``min(num_cpus, n)`` workers, or one in ``"dummy"``.
            ``None`` or 0: all usable cores or, in Ray modes, all cores of the cluster. A number larger than the number
            of cores helps if envs spend their time waiting.
        num_gpus: Number of GPUs, which Ray workers share evenly; fractions are allowed.
        no_warning: Whether to drop warnings that are issued in worker processes.
        timeout: Seconds that a step, a reset, a method call or a chunk of a rollout may take before it raises
            `WorkerTimeoutError`; ``None``: no limit. It has no effect on envs that the caller's own thread steps.
        on_failure: What happens if an env raises an exception in a step, its worker dies, or a step takes longer than
            ``timeout``. ``"raise"``: the step raises an error. ``"restart"``: the env is rebuilt and reset, as are all
            other envs of a worker that died or took too long; the episodes of all these envs count as truncated. For
            each of them, the result of the step contains the first state of the new episode, reward 0, and ``True`` for
            done and truncated; ``info["failure"]`` is the exception. With ``asynchronous="restart"``,
            ``info["ended_state"]`` is ``None``. If the env was seeded, its new seed is derived from the old one.
        max_restarts: Number of restarts allowed per env within ten minutes. Once they are used up, the env's next
            failure is raised. The first restart is immediate; before each further restart there is a pause, which is
            longer each time, up to 5 s.
        output: ``"show"``: lines that envs print in worker processes appear on ``sys.stdout`` during calls to this
            object, with a prefix such as ``[env 3]``. ``"quiet"``: these lines are dropped. In both cases, the error
            for a dead worker contains the last lines that the worker printed. In mode ``"ray"``, none of this applies
            to text that C code prints; Ray shows that text. Envs in this process print as usual.
        copy: ``False`` makes ``step`` and ``reset`` return states as read-only views that are valid until the next
            call.
        spaces: ``(observation_space, action_space)`` of every env, for envs that declare no spaces or are slow to
            declare them. The envs' own spaces are then not read. A state whose shape or dtype does not fit its space
            raises `EnvContractError`; such an action raises `ActionError`.
        keep: When a notebook cell that makes a `ParallelEnv` is run again, every `ParallelEnv` that its earlier runs
            left open is closed, if the front end sends the ids of cells. ``True`` exempts this object.
        seed: Seed of the first episodes, as if set with the method `seed`. While an env is built,
            ``get_worker_info().seed`` is this seed plus the env id.
        shared: A dict of arrays. The arrays are copied once, to a place where all workers can read them. Envs read the
            array called ``name`` as ``get_worker_info().shared["name"]``; they cannot write to it.
        seed_globals: Whether each env has its own state of the process-wide random generators: those of ``random`` and
            ``numpy.random`` and, from the first call after the env has imported torch, torch's CPU generator. A reset
            with seed ``s`` also seeds these generators with ``s``. Initially, they are seeded with ``seed`` plus the
            env id or, without ``seed``, with a random number from the operating system. While an env is built, reset,
            stepped or called, the generators have the env's state; afterwards the process's own state is restored.
            `save_state` also saves each env's state of the generators. With this option, envs that draw from these
            generators give the same results in every mode. The cost is about 60 us per message to a worker and 15 us
            per env step. Threads share the generators, so with ``"thread"``, ``num_cpus`` must be 1, and the caller
            must not draw from the generators during a step.
        **backend_options: Options of the chosen backend.

    Raises:
        ArgumentError: If an argument has an invalid value.
        InvalidEnvError: If an item of ``envs`` is not an env, if the same env object appears twice, or if
            ``on_failure="restart"`` is given with env instances that would live in this process, or could
            with ``"auto"``.
        UnpicklableError: If an env or env fn must be sent to a worker process but cannot be pickled.
        BaseException: Any exception raised by an env's constructor.
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
        on_failure: Literal["raise", "restart"] = "raise",
        max_restarts: int = 10,
        output: Literal["show", "quiet"] = "show",
        copy: bool = True,
        spaces: Spaces | None = None,
        keep: bool = False,
        seed: int | None = None,
        shared: Mapping[str, Any] | None = None,
        seed_globals: bool = False,
        **backend_options: Any,
    ) -> None:
        done_policy, listener = make_done_policy(asynchronous), make_listener(output)
        num_cpus = arguments.check_counts(num_cpus, num_gpus)
        arguments.check_flags(no_warning=no_warning, copy=copy, keep=keep, seed_globals=seed_globals)
        timeout, spaces = arguments.check_timeout(timeout), arguments.check_spaces(spaces)
        arguments.check_failure_handling(on_failure, max_restarts)
        for_envs: dict[str, Any] = {"seed": arguments.check_base_seed(seed), "shared": check_shared(shared)}
        for_envs["seed_globals"] = seed_globals
        env_factories = env_specs.make_factories(envs)
        if on_failure == "restart" and registry.may_live_here(para_mode):
            env_specs.refuse_live(env_factories)
        backend, num_cpus, chosen = registry.resolve_backend(
            para_mode, backend_options, env_factories, num_cpus, num_gpus, spaces, for_envs, _ARGUMENTS
        )
        self._para_mode = registry.word_of(chosen.mode if chosen else para_mode)
        self._recommendation = chosen
        spec = WorkerSpec((), (), no_warning, **for_envs)
        cell_reruns.close_earlier()
        self._engine = Engine(
            backend,
            env_factories,
            done_policy,
            spaces=spaces,
            copy=copy,
            timeout=timeout,
            max_restarts=max_restarts if on_failure == "restart" else None,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            listener=listener,
            spec=spec,
        )
        self._guard = self._engine.guard
        self._awaited: Ticket | None = None  # of the latest `step_async`
        self._live.add(self)
        if not keep:
            cell_reruns.register(self)
        if chosen is not None:
            try:
                chosen.warn_of_problem()
            except Warning:  # warnings are errors
                self.close()
                raise

    @property
    def engine(self) -> Engine:
        """The object that sends commands to workers and collects replies; adapters, wrappers and displays use it."""
        return self._engine

    @classmethod
    def make(
        cls,
        id: str | gymnasium.envs.registration.EnvSpec,
        num_envs: int = 1,
        para_mode: ParaMode = "dummy",
        *args: Any,
        backend_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> ParallelEnv:
        """Return a `ParallelEnv` of ``num_envs`` envs made by ``gymnasium.make(id, ...)``.

        ``id`` is a registered id or an `EnvSpec`. The constructor's arguments are accepted under the same names.
        Options of the mode are given in the dict ``backend_options``. All other keyword arguments are passed to
        ``gymnasium.make``.

        Raises:
            InvalidEnvError: If ``id`` is not registered, or is neither an id nor an `EnvSpec`.
            ArgumentError: If a keyword argument is not an argument of the env, but is an option of the mode or an
                argument of Stable-Baselines3's ``make_vec_env`` or Gymnasium's ``make_vec``.
        """
        arguments.check_positive("num_envs", num_envs)
        options = {name: kwargs.pop(name) for name in _ARGUMENTS[2:] if name in kwargs}
        spec = env_specs.registered(id, kwargs, _MAKE_ARGUMENTS, registry.option_names(para_mode))
        env_fn = functools.partial(gymnasium.make, spec, **kwargs)
        return cls([env_fn] * num_envs, para_mode, *args, **options, **(backend_options or {}))  # type: ignore[misc]

    @classmethod
    def make_vec(
        cls,
        id: str | gymnasium.envs.registration.EnvSpec,
        num_envs: int = 1,
        para_mode: ParaMode = "dummy",
        *args: Any,
        num_workers: int | None = None,
        vectorization_mode: str | None = None,
        backend_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> ParallelEnv:
        """Return a `ParallelEnv` of vector envs, one per worker, with ``num_envs`` envs in total.

        The envs are divided evenly among the vector envs. A vector env of ``k`` envs is made in its worker by
        ``gymnasium.make_vec(id, k, vectorization_mode, ...)``. The documentation page on vector envs lists the done
        policies that they support.

        Args:
            id: A registered id or an `EnvSpec`.
            num_envs: Number of envs.
            para_mode: See the constructor.
            *args: Further arguments of the constructor, by position.
            num_workers: Number of vector envs. ``None``: one if the mode runs envs in this process, or may choose to
                (``"auto"``); otherwise ``num_cpus`` (by default one per usable core), but at most ``num_envs``.
            vectorization_mode: ``"vector_entry_point"``, ``"sync"`` or ``"async"``; ``None``: ``"vector_entry_point"``
                if the id has one, else ``"sync"``.
            backend_options: Options of the mode.
            **kwargs: Arguments of the constructor, by name; all other keyword arguments are passed to
                ``gymnasium.make_vec``.

        Raises:
            InvalidEnvError: If ``id`` is not registered or is neither an id nor an `EnvSpec`, or if the vector env does
                not support the chosen ``asynchronous``.
            ArgumentError: If ``num_envs`` or ``num_workers`` is less than 1, or ``num_workers`` is larger than
                ``num_envs``.
        """
        arguments.check_positive("num_envs", num_envs)
        options = {name: kwargs.pop(name) for name in _ARGUMENTS[2:] if name in kwargs}
        spec = env_specs.registered(id, {}, ())
        num_cpus = arguments.check_counts(args[1] if len(args) > 1 else options.get("num_cpus"), 0)
        if num_workers is None:
            num_workers = 1 if registry.may_live_here(para_mode) else min(num_envs, num_cpus or usable_cores())
        arguments.check_positive("num_workers", num_workers)
        if num_workers > num_envs:
            raise ArgumentError(f"num_workers={num_workers} is more than num_envs={num_envs}. Each needs an env.")
        size, num_larger = divmod(num_envs, num_workers)
        env_fns = [
            functools.partial(
                gymnasium.make_vec, spec, size + (worker < num_larger), vectorization_mode=vectorization_mode, **kwargs
            )
            for worker in range(num_workers)
        ]
        if len(args) < 2:  # otherwise num_cpus is given by position
            options.setdefault("num_cpus", num_workers)
        return cls(env_fns, para_mode, *args, **options, **(backend_options or {}))  # type: ignore[misc]

    @classmethod
    def from_samplers(
        cls,
        make_sampler_fn: Callable[..., Any],
        sampler_fn_args: Sequence[Mapping[str, Any]],
        para_mode: ParaMode = "dummy",
        auto_resample_when_done: bool = True,
        **options: Any,
    ) -> TaskPool:
        """Return a `TaskPool`: a `ParallelEnv` whose envs are task samplers and whose episodes are tasks.

        Args:
            make_sampler_fn: A function that returns a `TaskSampler`. It is called in the worker that will run the
                sampler.
            sampler_fn_args: Keyword arguments of ``make_sampler_fn``: one dict per env. The dicts are copied.
            para_mode: See the constructor.
            auto_resample_when_done: ``True``: the sampler's next task starts within the step that ends the current
                task, as with ``asynchronous="restart"``. ``False``: the env is idle until `TaskPool.next_task` is
                called, as with ``asynchronous="idle"``.
            **options: Other arguments of the constructor, except ``asynchronous``.

        Raises:
            ArgumentError: If ``sampler_fn_args`` is not a sequence of dicts, or ``asynchronous`` is given.
            InvalidEnvError: If ``make_sampler_fn`` does not return a sampler.
            BaseException: Any error that the constructor raises.
        """
        from parallelenv.tasks.task_pool import TaskPool, make_env_fns  # that module imports this one

        if "asynchronous" in options:
            raise ArgumentError(
                f"asynchronous={options['asynchronous']!r} was given to from_samplers(). Give auto_resample_when_done: "
                "True is 'restart', False is 'idle'. For another done policy, make a TaskPool of env fns that return "
                "a TaskEnv."
            )
        arguments.check_flags(auto_resample_when_done=auto_resample_when_done)
        asynchronous: Literal["idle", "restart"] = "restart" if auto_resample_when_done else "idle"
        return TaskPool(make_env_fns(make_sampler_fn, sampler_fn_args), para_mode, asynchronous, **options)

    @classmethod
    def replicate(
        cls, env: Any, num_envs: int, para_mode: ParaMode = "dummy", *args: Any, seed: int | None = None, **kwargs: Any
    ) -> ParallelEnv:
        """Return a `ParallelEnv` of ``num_envs`` copies of one env.

        ``env`` is an env fn, an env (which is copied), a registered id or an `EnvSpec`. Each copy has a rank, which is
        its env id; the copy can read the rank with `get_worker_info`. If an env fn has a parameter ``rank``, it gets
        the rank; a parameter ``world_size`` gets ``num_envs``, and a parameter ``seed`` gets ``seed`` plus the rank.
        All other arguments are those of the constructor.

        Raises:
            InvalidEnvError: If ``env`` is not an env, an env fn, a registered id or an `EnvSpec`.
            UnpicklableError: If ``env`` cannot be copied.
        """
        arguments.check_positive("num_envs", num_envs)
        copies = env_specs.replicate(env, num_envs, arguments.check_base_seed(seed))
        return cls(copies, para_mode, *args, seed=seed, **kwargs)

    # ---------------------------------------------------------------- episodes and steps

    @single_threaded
    def reset(self, id: Ids = None, *, seed: Seeds = None, options: Options = None) -> State:
        """Start new episodes and return only their first states; Gymnasium's ``reset`` returns the infos as well.

        If an env to be reset has a step that is in flight or was interrupted, that step is dropped.

        Args:
            id: The envs to reset.
            seed: Int ``s``: env i gets ``s + i``. A list: one seed per env of ``id``. ``None``: the seeds set with the
                method `seed`, if any.
            options: A dict for all envs, or a list with one dict per env of ``id``.

        Returns:
            States, batched as in the result of `step`, in the order of ``id``. The infos are in `reset_infos`. (The
            vector env that `to_gymnasium` returns has a ``reset`` that returns both states and infos.) If an env's own
            ``reset`` raises `ExhaustedError`, the env has no further episode: its state is ``None``, and the env is
            `exhausted`. Until a later reset starts an episode, the env's steps return ``(None, None, True,
            {"exhausted": True})``, whatever ``asynchronous`` is.

        Raises:
            ArgumentError: If ``seed`` or ``options`` is invalid, or if the calling code unpacks the result into states
                and infos, as code written for Gymnasium does; nothing was reset.
            WorkerTimeoutError: If the resets took longer than the ``timeout`` of the `ParallelEnv`. All envs of ``id``
                then need another reset.
            BaseException: Any exception raised by an env; ``error.partial`` has the states of the other envs, whose
                episodes have started.
        """
        try:
            env_ids = self._engine.ids(id)
        except IdRangeError as error:
            hint = f" To set a seed, write reset(seed={id})." if isinstance(id, int) and id >= 0 else ""
            raise IdRangeError(f"{error}{hint}") from None
        refuse_pair(len(env_ids) if self._engine.pool.layout.states.is_single else None)
        each = self._engine.reset_arguments(env_ids, seed, options)
        return self._engine.collect_reset(self._engine.submit_reset(env_ids, each), None)

    @single_threaded
    def seed(self, seed: int | Sequence[int | None]) -> list[int | None]:
        """Set the seeds that the next reset of each env uses, and return the seeds in env id order.

        With an int ``s``, env i gets ``s + i``. A list has one seed per env. Resets within a step get no seed, and
        leave these seeds for the next call of `reset`, `send_reset`, `run_episodes`, `play` or `record`.

        Raises:
            ArgumentError: If ``seed`` is neither an int nor such a list, or if it has separate seeds for the envs of a
                vector env that accepts only one seed for all of its envs.
        """
        seeds = arguments.spread_seeds(seed, self._engine.env_ids, whole=True)
        self._engine.pool.groups.refuse_seeds(self._engine.env_ids, seeds)
        self._engine.seeds = dict(enumerate(seeds))
        return seeds

    @overload
    def step(self, action: Action, id: Ids = None, align: _Item = "item") -> StepResult: ...
    @overload
    def step(self, action: Action, id: Ids = None, align: _Batch = ...) -> StepBatch: ...
    @shortens_tracebacks
    def step(self, action: Action, id: Ids = None, align: Align = "item") -> StepResult | StepBatch:
        """Step envs and wait for all of them.

        Args:
            action: One action per env, in the order of ``id``: a batch like the one that ``action_space.sample()``
                returns, or a list. Tensors that require grad, and torch modules whose parameters require grad, are
                passed unchanged to envs in this process.
            id: The envs to step.
            align: Form of the result, ``"item"`` or ``"batch"``.

        Returns:
            With ``"item"``, a `StepResult`, which unpacks to ``states, rewards, dones, infos``. With ``"batch"``, a
            `StepBatch`, which is a list with one tuple ``(state, reward, done, info)`` per env. Both results have the
            attributes ``terminated``, ``truncated`` and ``env_ids``.

        Raises:
            ResetNeededError: If an env has never been reset, or its last step was lost.
            EnvBusyError: If a step of an env is in flight or was interrupted, or ``id`` names a paused env.
            ActionError: If the actions do not fit the envs, or require grad but must be copied to another process. If
                this error or one of the two above is raised, no env has been stepped.
            BaseException: Any exception raised by an env; ``error.partial`` is the result of the other envs.
            WorkerDiedError: If the worker of an env has died.
            WorkerTimeoutError: If the step took longer than the ``timeout`` of the `ParallelEnv`; `recv` can still
                return the results.
        """
        engine, guard = self._engine, self._guard
        use, outermost, call = (threading.get_ident(), "step"), None, ""
        # This method does the work of the decorator `single_threaded` itself, which saves a frame. The comment in
        # `single_threaded` gives the reason for `setdefault` and for the two conditions in `finally` (an interrupt
        # between `setdefault` and the assignment). While `use` is in `guard.users`, calls from other threads are
        # refused, so a plan that is valid at this point stays valid until its step is done. A call made within another
        # call finds the outer `use` in `guard.users` and takes the general path; a traced call takes that path too.
        try:
            plan = engine.plans.get(align) if id is None and type(align) is str else engine.plan_of(id, align)
            if plan is not None and guard.tracer is None:
                outermost = guard.users.setdefault("", use)
                if outermost is use and guard.is_usable() and plan.is_valid():
                    call = "step"
                    return plan.step(action, engine)
                if outermost is use:
                    guard.users.clear()
                    outermost = None
            arguments.check_align(align)
            return engine.step(action, None if id is None else engine.ids(id), align)
        except BaseException as error:
            guard.shorten(error, call)
            raise
        finally:
            if outermost is use or guard.users.get("") is use:
                guard.users.clear()

    # ---------------------------------------------------------------- asynchronous stepping

    @single_threaded
    def step_async(self, action: Action, id: Ids = None) -> None:
        """Send actions to envs and return without waiting, like `ParallelEnv.send`; `step_wait` returns the results.

        Raises:
            ResetNeededError, EnvBusyError, ActionError, WorkerDiedError: See `ParallelEnv.step`; nothing was sent.
        """

        def announce(ticket: Ticket) -> None:  # just before the step is sent, so that Ctrl-C cannot separate the two
            self._awaited = ticket

        self._engine.submit_step(action, self._engine.ids(id), separately=True, announce=announce)

    @overload
    def step_wait(self, timeout: float | None = None, align: _Item = "item") -> StepResult: ...
    @overload
    def step_wait(self, timeout: float | None = None, align: _Batch = ...) -> StepBatch: ...
    @single_threaded
    def step_wait(self, timeout: float | None = None, align: Align = "item") -> StepResult | StepBatch:
        """Wait for the envs of the latest `step_async` and return the result of their step, in the form of `step`.

        The envs are in the order of the ``id`` that was given to `step_async`. ``timeout`` is in seconds; ``None``
        means the ``timeout`` of the `ParallelEnv`.

        Raises:
            NothingInFlightError: If `step_async` has not been called, or its results have been returned by a later
                `recv` or dropped by a later `reset`.
            WorkerTimeoutError: If the results do not arrive in time; you can then call this method again.
            BaseException: Any exception raised by an env; ``error.partial`` is the result of the other envs.
        """
        arguments.check_align(align)
        limit = arguments.check_timeout(timeout)
        if self._awaited is None:
            raise NothingInFlightError("step_wait() was called, but no step is in flight. Call step_async() first.")
        result = self._engine.step_wait(self._awaited.env_ids, limit, align, self._awaited)
        self._awaited = None
        return result

    @single_threaded
    def send(self, action: Action, id: Ids = None) -> None:
        """Send actions to envs and return without waiting; `recv` returns the results of the steps.

        Raises:
            ResetNeededError, EnvBusyError, ActionError, WorkerDiedError: See `step`; nothing was sent.
            WorkerTimeoutError: If an action is too large to be sent to a busy worker, and the worker is busy for longer
                than the ``timeout`` of the `ParallelEnv`; nothing was sent.
        """
        self._engine.submit_step(action, self._engine.ids(id), separately=True)

    @single_threaded
    def send_reset(self, id: Ids = None, *, seed: Seeds = None, options: Options = None) -> None:
        """Start new episodes and return without waiting; `recv` returns the first states.

        If an env to be reset has a step whose result has not been received, that step is dropped. In the result of
        `recv`, each reset env has its first state and reward 0, and is not done; its info is the info of the reset,
        with ``info["reset"]`` set to ``True``. There is no ``info["ended_state"]``, because no episode ended. See
        `reset` for the arguments.

        Raises:
            ArgumentError: If ``seed`` or ``options`` is invalid; nothing was sent.
            WorkerDiedError: If the worker of an env has died; nothing was sent.
        """
        env_ids = self._engine.ids(id)
        self._engine.submit_reset(env_ids, self._engine.reset_arguments(env_ids, seed, options), separately=True)
        self._engine.forget_seeds(env_ids)

    @overload
    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: _Item = "item"
    ) -> StepResult: ...
    @overload
    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: _Batch = ...
    ) -> StepBatch: ...
    @single_threaded
    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> StepResult | StepBatch:
        """Return the results of envs that have finished their step or reset, in the order in which they finished.

        Args:
            min_envs: Number of envs to wait for. If fewer envs are in flight, the call waits for all of them.
            max_envs: Maximum number of envs in the result; the remaining results stay for the next call.
            timeout: Seconds to wait; ``None`` means the ``timeout`` of the `ParallelEnv`.
            align: See `step`.

        Returns:
            A result in the form of `step`; ``env_ids`` gives the env of each row.

        Raises:
            NothingInFlightError: If no step or reset is in flight.
            WorkerTimeoutError: If fewer than ``min_envs`` envs finished in time; no result is lost.
            BaseException: Any exception raised by an env; ``error.partial`` is the result of the other envs.
        """
        arguments.check_align(align)
        arguments.check_window(min_envs, max_envs)
        return self._engine.receive(min_envs, max_envs, arguments.check_timeout(timeout), align)

    @overload
    async def arecv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: _Item = "item"
    ) -> StepResult: ...
    @overload
    async def arecv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: _Batch = ...
    ) -> StepBatch: ...
    async def arecv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> StepResult | StepBatch:
        """Return the result of `recv`, while other tasks of the event loop run. Cancelling this call loses no result.

        The event loop watches a file descriptor that becomes readable when a worker replies. If there is no such
        descriptor (on Windows, and for actors reached through Ray calls), this method polls instead; polling makes the
        call take at most one eighth longer, and never more than 0.25 s longer. No extra thread is used. In mode
        ``"dummy"`` the envs step inside this call.

        Raises:
            NothingInFlightError: If no step or reset is in flight, for example because another task has received the
                results.
            The errors of `recv`.
        """
        arguments.check_align(align)
        arguments.check_window(min_envs, max_envs)
        limit = arguments.check_timeout(timeout)
        start = time.monotonic()
        while True:
            if self._engine.poll(min_envs, limit, start):
                # Yield to other tasks. A cancellation that arrived while envs stepped (for example, by Ctrl-C) is
                # raised here, before the result is taken, because a cancelled task that returns loses its result.
                await asyncio.sleep(0)
                result: StepResult | StepBatch | None = self._engine.receive_now(min_envs, max_envs, align)
                if result is not None:
                    return result
            await self._engine.sleep_until_reply(limit, start)

    def get_state(self, timeout: float | None = None) -> tuple[State, int] | None:
        """Return the state and the id of the env that has waited longest for an action.

        `get_state` and `send_action` do the same as `recv` and `send`, for one env at a time; call `send_reset` first.
        To get rewards, flags and infos as well, use ``recv(1, 1, align="batch")`` instead. ``timeout`` is in seconds;
        ``None`` means the ``timeout`` of the `ParallelEnv`.

        Returns:
            ``(state, env_id)``. The state is `TERMINATED` if the env's episode has ended and no new episode has
            started; with ``asynchronous="restart"``, this happens only if the env has no further episode (see
            `exhausted`). If no env is ready within ``timeout`` seconds, the result is ``None``.

        Raises:
            The errors of `recv`, but `WorkerTimeoutError` only if ``timeout`` is ``None``.
        """
        try:
            batch = self.recv(1, 1, timeout, "batch")
        except WorkerTimeoutError as error:
            if timeout is None or reports_failures(error):
                raise
            return None
        (state, _, is_done, _), env_id = batch[0], int(batch.env_ids[0])
        has_begun = self._engine.done_policy.autoreset and env_id not in self._engine.table.exhausted
        return (state if has_begun or not is_done else TERMINATED), env_id

    def send_action(self, action: Action, env_id: int) -> None:
        """Send an action to one env and return without waiting.

        Args:
            action: The action of the step. `RESET` or ``"reset"`` starts an episode, like `send_reset`. `CLOSE` or
                ``"close"`` pauses the env, like `pause`, until `resume` is called; the env's memory is freed only when
                the `ParallelEnv` is closed. (`send` treats the strings ``"reset"`` and ``"close"`` as actions.)
            env_id: Id of the env.

        Raises:
            ArgumentError: If ``env_id`` does not name exactly one env, or the action is `TERMINATED`.
            The errors of `send`.
        """
        if len(self._engine.ids(env_id)) != 1:
            raise ArgumentError(
                f"env_id={show(env_id)} is not the id of one env. Give an int, or use send(actions, id)."
            )
        word = action if isinstance(action, str) else None  # an array would be compared item by item
        if word == RESET:
            self.send_reset(env_id)
        elif word == CLOSE:
            self.pause(env_id)
        elif isinstance(action, Signal):
            raise ArgumentError(f"action={show(action)} is not an action. Give an action of the env, RESET or CLOSE.")
        else:
            self.send([action], env_id)

    def stream(
        self,
        policy: Policy,
        num_steps: int | None = None,
        *,
        min_envs: int = 1,
        max_envs: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[tuple[Array, StepResult]]:
        """Run a policy, in this process, on the envs that are ready: ``for env_ids, result in env.stream(policy)``.

        Each round of the loop sends an action to every env that is not paused, has nothing in flight, and is not idle
        after the end of its episode (see ``asynchronous``). The envs are not reset first: running episodes continue. An
        env that you pause in the loop drops out after its next result, until you resume it. An env that is idle takes
        part again after you reset it with `send_reset`. The next steps are sent before a result is yielded, so envs
        step while the body of the loop runs. You can leave the loop at any time: `recv` or the next stream returns the
        results of steps still in flight.

        Args:
            policy: ``policy(states)`` returns one action per env that is ready; states are batched as in the result of
                `step`. If the policy has a parameter ``env_ids``, it gets the ids of these envs as well.
            num_steps: Total number of steps of all envs, after which the loop ends with nothing in flight. ``None``:
                the loop ends when no env can step further, or when this object is closed.
            min_envs: See `recv`.
            max_envs: See `recv`.
            timeout: See `recv`.

        Yields:
            ``(env_ids, result)``: a result of `recv` and its ``env_ids``.

        Raises:
            ArgumentError: If an argument has an invalid value.
            ResetNeededError: If an env that is not paused has never been reset, or its last step was lost.
            BaseException: Any exception raised by an env, as in `recv`, or by the policy. If the policy raised it,
                ``error.partial`` is the result that was not yielded.
        """
        arguments.check_window(min_envs, max_envs)
        if num_steps is not None:
            arguments.check_positive("num_steps", num_steps)
        stream = Stream(self._engine, policy)
        return stream.results(num_steps, min_envs, max_envs, arguments.check_timeout(timeout))

    @single_threaded
    def pause(self, id: Any = MISSING) -> None:
        """Leave envs out of later calls that give no ``id``, and refuse to step them, until `resume` is called.

        A step in flight continues, and `recv` returns its result. With ``id=None``, all envs are paused.

        Raises:
            ArgumentError: If ``id`` is not given.
        """
        if id is MISSING:
            raise ArgumentError("pause() was called without id. Give the envs to leave out: pause(3), pause([0, 2]).")
        self._engine.table.set_paused(self._engine.ids(id, with_paused=True), True)

    @single_threaded
    def resume(self, id: Ids = None) -> None:
        """Let paused envs take part in calls again, by default all of them."""
        self._engine.table.set_paused(self._engine.ids(id, with_paused=True), False)

    # ---------------------------------------------------------------- attributes, methods, frames

    @single_threaded
    def get_env_attr(self, key: str, id: Ids = None, default: Any = MISSING) -> list[Any]:
        """Return an attribute of each env, looked up from the outermost wrapper down to the env itself.

        If the attribute is not found and the env has its own method ``get_env_attr(key)``, that method is called. Its
        result is used, unless it is ``None`` or the method raises an `AttributeError` about ``key``.

        Args:
            key: Name of the attribute; ``"a.b"`` is the attribute ``b`` of the env's attribute ``a``. The name is never
                evaluated as code.
            id: The envs.
            default: Value returned for an env without this attribute; by default ``None``.

        Returns:
            Copies of the values, one per env, in the order of ``id``.

        Raises:
            ArgumentError: If ``key`` is not a valid name.
            AttributeError: If the code of a property raises one; the attribute is then not absent. As with any other
                exception of a property, ``error.partial`` maps the ids of the other envs to their values.
            UnpicklableError: If a value cannot be copied from the env's worker; ``error.partial`` as above.

        Warns:
            AbsentAttributeWarning: If no env has the attribute, the first of the envs has an attribute with a similar
                name, and no default was given.
        """
        env_ids = self._engine.ids(id)
        arguments.check_name("key", key)
        other = None if default is MISSING else default
        values = self._engine.attributes(key, env_ids, other)
        if default is MISSING and not values and env_ids and (hint := self._engine.attribute_hint(key, env_ids[0])):
            message = f"No env has an attribute {key!r}, so all values are None.{hint}"
            warn_user(f"{message} If you expect that, give default=None.", AbsentAttributeWarning)
        return [values.get(env_id, other) for env_id in env_ids]

    @single_threaded
    def set_env_attr(
        self, key: str, value: Any = MISSING, id: Ids = None, *, values: Sequence[Any] | None = None
    ) -> None:
        """Set an attribute of each env, on the outermost wrapper that has it, or else on the env inside all wrappers.

        The attribute is not read before it is set, and a wrapper that only passes it on does not have it.
        If neither the env nor a wrapper has the attribute, but the env has its own method ``set_env_attr(key, value)``,
        that method is called instead.

        Args:
            key: Name of the attribute; see `get_env_attr`.
            value: The value for every env. A list or tuple is treated like ``values``.
            id: The envs.
            values: Instead of ``value``, a list with one value per env, in the order of ``id``. To set the same list on
                all n envs, give ``values=[the_list] * n``.

        Raises:
            ArgumentError: If ``key`` is not a valid name, both or neither of ``value`` and ``values`` are given, a list
                has the wrong length, or ``value`` is an array or tensor with as many rows as there are envs, which is
                ambiguous.
            UnpicklableError: If a value cannot be copied to the env's worker; nothing was set.

        Warns:
            AbsentAttributeWarning: If none of the envs had the attribute, and the first of the envs has an attribute
                with a similar name.
        """
        env_ids = self._engine.ids(id)
        arguments.check_name("key", key)
        is_new = self._engine.pool.ask("set", env_ids, arguments.spread_values(value, values, env_ids), key).values
        if env_ids and len(is_new) == len(env_ids) and (hint := self._engine.attribute_hint(key, env_ids[0])):
            message = f"{key!r} was set as a new attribute, because no env had it.{hint}"
            warn_user(message, AbsentAttributeWarning)

    @single_threaded
    def customized_method(self, env_method: str, data: Any = None, id: Ids = None) -> list[Any]:
        """Call a method of each env and return copies of the results, in the order of ``id``.

        Args:
            env_method: Name of the method, which is looked up from the outermost wrapper down to the env; ``"a.b"``
                calls the method ``b`` of the env's attribute ``a``.
            data: Keyword arguments: a dict for all envs, or a list with one dict per env. The dicts and their values
                are copied, so that no two envs share an argument.
            id: The envs.

        Raises:
            ArgumentError: If ``env_method`` is not a valid name, or ``data`` is invalid; nothing was called.
            AbsentAttributeError: If an env has no such method; the methods of the other envs were called.
            BaseException: Any exception raised by a method; ``error.partial`` maps the ids of the other envs to their
                results.
        """
        env_ids = self._engine.ids(id)
        arguments.check_name("env_method", env_method)
        each = arguments.spread_data(data, env_ids)
        if each is None:
            return self._engine.pool.ask("call", env_ids, None, MethodCall(env_method)).listed()
        return self._engine.call_each(env_ids, [MethodCall(env_method, (), named) for named in each])

    @single_threaded
    def call(self, function_names: str | Sequence[str], function_args_list: Any = None, id: Ids = None) -> list[Any]:
        """Call a method of each env, possibly a different method for each env, and return copies of the results.

        Args:
            function_names: A method name for all envs, or a list with one name per env; see ``env_method`` of
                `customized_method`.
            function_args_list: A list with one item per env: a list or tuple of positional arguments, a dict of keyword
                arguments, or ``None`` for no arguments. Arguments are copied.
            id: The envs; the results are in the order of ``id``.

        Raises:
            ArgumentError: If a name is invalid, or a list does not have one item per env; nothing was called.
            AbsentAttributeError: If an env has no such method; the methods of the other envs were called.
            BaseException: Any exception raised by a method; ``error.partial`` maps the ids of the other envs to their
                results.
        """
        env_ids = self._engine.ids(id)
        names = arguments.spread_names("function_names", function_names, env_ids)
        given = arguments.spread_arguments(function_args_list, env_ids)
        return self._engine.call_each(env_ids, [MethodCall(name, *one) for name, one in zip(names, given, strict=True)])

    @single_threaded
    def attr(self, names: str | Sequence[str], id: Ids = None) -> list[Any]:
        """Return a copy of an attribute of each env, in the order of ``id``.

        Every env must have the attribute that is requested from it.

        ``names`` is a name for all envs, or a list with one name per env; see ``key`` of `get_env_attr`.

        Raises:
            ArgumentError: If a name is invalid, or the list does not have one name per env; nothing was read.
            AbsentAttributeError: If an env has no such attribute; ``error.partial`` maps the ids of the other envs to
                their values.
        """
        env_ids = self._engine.ids(id)
        return self._engine.pool.ask(
            "get", env_ids, arguments.spread_names("names", names, env_ids), Lookup(how="required")
        ).listed()

    @single_threaded
    def command(self, name: str, data: Any = None, id: Ids = None) -> list[Any]:
        """Call the method ``command(name, data)`` of each env and return copies of the results, in the order of ``id``.

        ``name`` is any string that the envs understand; each env gets a copy of ``data``.

        Raises:
            ArgumentError: If ``name`` is not a string; nothing was called.
            AbsentAttributeError: If an env has no method ``command``; the methods of the other envs were called.
            BaseException: Any exception raised by an env; ``error.partial`` maps the ids of the other envs to their
                results.
        """
        env_ids = self._engine.ids(id)
        if not isinstance(name, str):
            raise ArgumentError(f"name={name!r} is not the name of a command. Give a string that the envs understand.")
        return self._engine.call_each(env_ids, [MethodCall("command", (name, data))] * len(env_ids))

    @single_threaded
    def render(self, id: Ids = None, tile: bool = False, labels: bool = False) -> Any:
        """Return a list with the result of each env's ``render()``, in the order of ``id``.

        With ``tile``, return one picture instead, a uint8 array of shape ``(height, width, 3)``, in which the frames
        form a grid without gaps; the frames may differ in size. With ``labels`` as well, the grid has gaps, and each
        frame shows its env id, as in `show`.

        Raises:
            ArgumentError: If ``tile`` is given and a frame is not a uint8 array (RGB, grey, or RGB with alpha, which is
                dropped), or if ``labels`` is given without ``tile``.
        """
        env_ids = self._engine.ids(id)
        if labels and not tile:
            raise ArgumentError("labels=True draws env ids on the tiles of one picture. Add tile=True.")
        if not tile:
            return self._engine.call_each(env_ids, [MethodCall("render")] * len(env_ids))
        return _notebook().picture_of(self._engine, env_ids, labels=labels)

    def get_images(self, id: Ids = None) -> list[Any]:
        """Return a list with the frame of each env, as ``render(id)`` does."""
        return self.render(id)  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- episodes, rollouts, saved state

    @single_threaded
    def run_episodes(
        self,
        policy: Policy,
        num_episodes: int,
        id: Ids = None,
        *,
        seed: Seeds = None,
        options: Options = None,
        progress: bool = True,
    ) -> Evaluation:
        """Run whole episodes and return their statistics; the policy is called in this process.

        Each env runs an equal share of the episodes, and is then idle while the other envs finish. If the episodes do
        not divide evenly, the first envs run one more each. Shares are fixed beforehand, so short episodes are not
        over-represented. All envs that run episodes are reset at the start, even if they are in the middle of an
        episode, and need a reset afterwards. ``asynchronous`` has no effect. If the policy can be pickled, `rollout` is
        faster, and it also returns all steps.

        Args:
            policy: A policy as in `rollout`, except that it is called in this process, with the states of all envs that
                have not finished their share.
            num_episodes: Total number of episodes of all envs.
            id: The envs.
            seed: Seed of the first reset; see `reset`.
            options: Options of the first reset; see `reset`.
            progress: See `rollout`.

        Raises:
            ArgumentError: If ``num_episodes`` is not an int of at least 1, ``id`` names no envs, or another argument is
                invalid; nothing was sent.
            EnvBusyError: See `step`.
            BaseException: Any exception raised by an env or the policy; ``error.partial`` holds the episodes that ended
                before the exception.
        """
        env_ids = self._engine.ids(id)
        arguments.check_positive("num_episodes", num_episodes)
        if not env_ids:
            raise ArgumentError("run_episodes() has no envs to run: id is empty, or all are paused.")
        each = self._engine.reset_arguments(env_ids, seed, options)
        goal = RolloutLength.of(None, num_episodes)
        return evaluate(self._engine, policy, goal, env_ids, each, bool(progress))

    @overload
    def rollout(self, *, id: Ids = None) -> list[Any]: ...
    @overload
    def rollout(
        self,
        policy: Policy,
        num_steps: int | None = None,
        *,
        num_episodes: int | None = None,
        id: Ids = None,
        rnn_state: Any = None,
        progress: bool = True,
    ) -> Rollout: ...
    @single_threaded
    def rollout(
        self,
        policy: Policy | None = None,
        num_steps: int | None = None,
        *,
        num_episodes: int | None = None,
        id: Ids = None,
        rnn_state: Any = None,
        progress: bool = True,
    ) -> Rollout | list[Any]:
        """Run a policy inside the workers, and return all of its steps at once.

        The policy is sent to the workers once. The steps give the same results as `step`, but without a round trip for
        each step. The envs are not reset first: running episodes continue, in this call and in later calls. With a
        policy, ``asynchronous`` must not be ``None``.

        Args:
            policy: ``policy(states)`` returns one action per env. States have the form that `step` returns, with one
                row for each of the worker's envs that take part in the step. Actions have the form that `step` takes,
                with one exception: a tuple is always ``(actions, rnn_state, extras)``, so actions of a ``Tuple`` space
                must be returned as ``(actions, None, None)``. ``extras`` is a flat dict of arrays with one row per env;
                its keys and the shapes of the arrays must be the same in all steps, and their dtypes must be
                compatible. A policy with the parameters ``rnn_state`` and ``done`` gets the ``rnn_state`` that it
                returned last (nested arrays with one row per env; ``None`` at first). ``done`` is ``True`` for envs at
                the start of an episode and for envs without an ``rnn_state``. In every mode, each worker has its own
                copy of the policy.
            num_steps: Number of steps of each env; an env makes fewer steps if ``asynchronous`` leaves it idle after
                its episode.
            num_episodes: Number of episodes to finish, instead of ``num_steps``. Each env has an equal share; if the
                episodes do not divide evenly, the first envs have one more each. An episode that is running at the
                start counts. The shares are fixed, and the rollout waits for the slowest env, so short episodes are not
                over-represented. With ``asynchronous="idle"``, at most one episode per env is allowed; with
                ``"continue"``, ``num_episodes`` is not allowed. Exhausted envs have no share; envs that become
                exhausted finish fewer episodes.
            id: The envs.
            rnn_state: The policy's recurrent state for these envs. Give the `Rollout.rnn_state` of the previous
                rollout, so that running episodes continue with that state. ``None``: no state.
            progress: Whether to show a progress bar, on a terminal or in a notebook, after the first second.

        Returns:
            A `Rollout`. Without a policy, a list with the result of each env's own method ``run_batch_episode()``,
            which MetaBox's test units define.

        Raises:
            ArgumentError: With a policy: if ``num_steps`` and ``num_episodes`` are both given or both missing, or if
                ``asynchronous`` does not allow the rollout. Without a policy: if an env has no ``run_batch_episode()``,
                or if ``num_steps``, ``num_episodes`` or ``rnn_state`` is given.
            UnpicklableError: If the policy cannot be copied.
            ResetNeededError, EnvBusyError: See `step`. If one of the errors listed so far is raised, no env has been
                stepped.
            BaseException: Any exception raised by an env; the other envs finish the rollout first. An exception in the
                policy, the death of a worker, or a timeout ends the rollout after the current chunk. (Workers step in
                chunks of about 0.2 s; a timeout occurs if a chunk takes longer than the ``timeout`` of the
                `ParallelEnv`.) ``error.partial`` is the `Rollout` so far. Envs whose steps were lost need a reset, even
                if Ctrl-C was the cause.
        """
        env_ids = self._engine.ids(id)
        if policy is None:
            return run_batch_episodes(self._engine, env_ids, num_steps, num_episodes, rnn_state)
        goal = RolloutLength.of(num_steps, num_episodes)
        return RunningRollout(self._engine, policy, env_ids, goal, rnn_state).run(bool(progress))

    @single_threaded
    def restart(self, id: Ids = None) -> tuple[int, ...]:
        """Rebuild envs from the constructor's ``envs``, and return the ids of all rebuilt envs in ascending order.

        An env that was given as an instance and sent to another process is rebuilt as it was then, even if you have
        changed the instance.
        All rebuilt envs need a reset afterwards, even if Ctrl-C interrupts this call. A worker that has died, or is
        busy with one of the envs to rebuild, is replaced, and all of its envs are rebuilt. A worker that is busy only
        with its other envs may finish first; if that takes longer than the ``timeout`` of the `ParallelEnv`, the worker
        is replaced as well. ``id=None`` means all envs, including paused ones.

        Raises:
            InvalidEnvError: If an env to be rebuilt was given as an instance and lives in this process.
            BaseException: Any exception raised by an env's constructor.
        """
        ticket = self._engine.pool.rebuild(self._engine.ids(id, with_paused=True), self._engine.drop_episodes)
        ticket.raise_failures(partial=tuple(env_id for env_id in ticket.env_ids if env_id not in ticket.failures))
        return tuple(ticket.env_ids)

    @single_threaded
    def save_state(self) -> SavedState:
        """Return the state of all envs, with their episodes and seeds, as plain data that can be pickled.

        An env with ``get_state()`` and ``set_state(state)`` is saved through these methods; any other env is pickled.
        An env that cannot be saved either way, or whose worker has died, needs a reset after `load_state` (see
        `SavedState.unsaved`).

        Raises:
            EnvBusyError: If a step is in flight.
            WorkerTimeoutError: If an env takes longer than the ``timeout`` of the `ParallelEnv`.
            BaseException: Any exception raised by an env's ``get_state``.
        """
        engine, pool, recovery = self._engine, self._engine.pool, self._engine.recovery
        engine.refuse_busy(engine.env_ids)
        unreported = {} if recovery is None else recovery.unreported
        checkpoint = engine.table.checkpoint(env_id for env_id, (_, begun) in unreported.items() if begun is None)
        living = [env_id for env_id in engine.env_ids if env_id not in pool.dead]
        ticket = pool.ask("manage", living, None, "save", raises=False)
        for env_id in pool.dead.keys() & ticket.failures:  # the worker has died during this call
            del ticket.failures[env_id]
        ticket.raise_failures()
        envs = tuple(ticket.values.get(env_id) for env_id in engine.env_ids)
        seeds = None if recovery is None else dict(recovery.seeds)
        return SavedState(envs, checkpoint, dict(engine.seeds), self.asynchronous, seeds)

    @single_threaded
    def load_state(self, state: SavedState) -> tuple[int, ...]:
        """Continue from a saved state, and return the ids of the envs that need a reset.

        The state may have been saved by a different `ParallelEnv`, in any mode, if its envs were made in the same way.
        Steps in flight are dropped. The next steps give the same results as if they had been made right after the save.

        Returns:
            Ids of the envs that needed a reset when they were saved, and of those in `SavedState.unsaved`.

        Raises:
            ArgumentError: If ``state`` is not a `SavedState`, or was saved with a different number of envs,
                ``asynchronous`` or format version; nothing was changed.
            EnvContractError: If an env had different wrappers when it was saved; that env needs a reset.
            WorkerTimeoutError: If an env takes longer than the ``timeout`` of the `ParallelEnv`. All envs then need a
                reset, as they do after Ctrl-C.
            BaseException: Any exception raised by an env's ``set_state``; that env needs a reset.
        """
        state = check_saved(state, self._engine.num_envs, self.asynchronous)
        saved = [env_id for env_id in self._engine.env_ids if state.envs[env_id] is not None]
        engine, each = self._engine, [state.envs[env_id] for env_id in saved]
        ticket = engine.pool.ask(
            "manage", saved, each, "load", announce=lambda _: engine.drop_episodes(engine.env_ids), raises=False
        )
        with DeferSignals():  # until the end of this block, all envs need a reset
            need_reset = engine.table.restore(state.checkpoint, {*state.unsaved, *ticket.failures})
            engine.seeds = dict(state.seeds)
            if engine.recovery is not None and state.restart_seeds is not None:
                engine.recovery.seeds = dict(state.restart_seeds)
        ticket.raise_failures(partial=need_reset)
        return need_reset

    # ---------------------------------------------------------------- properties that need no worker

    @property
    def done(self) -> Array:
        """``(n,)`` bool: True for envs whose latest step ended their episode.

        With ``asynchronous=None``, it is True for all envs as soon as the episode of one env has ended.
        """
        return self._engine.table.done.copy()

    def has_done(self) -> bool:
        """Return True if any env is done."""
        return has_true(self._engine.table.done)

    def all_done(self) -> bool:
        """Return True if all envs are done."""
        return bool(self._engine.table.done.all())

    @property
    def exhausted(self) -> Array:
        """``(n,)`` bool: True for envs that are idle because they have no further episode. These envs are also done."""
        flags: Array = np.zeros(self._engine.num_envs, dtype=bool)
        flags[list(self._engine.table.exhausted)] = True
        return flags

    def all_exhausted(self) -> bool:
        """Return True if no env has a further episode."""
        return len(self._engine.table.exhausted) == self._engine.num_envs

    @property
    def paused(self) -> Array:
        """``(n,)`` bool: True for paused envs."""
        return self._engine.table.paused.copy()

    @property
    def num_unpaused(self) -> int:
        """Number of envs that are not paused."""
        return len(self._engine.table.unpaused)

    @property
    def reset_infos(self) -> list[Info]:
        """The info of each env's latest reset, in env id order."""
        return [deep_copy(info) for info in self._engine.table.reset_infos]

    @property
    def closed(self) -> bool:
        """True if this object has been closed."""
        return self._guard.is_closed

    @property
    def num_envs(self) -> int:
        """Number of envs."""
        return self._engine.num_envs

    @property
    def num_workers(self) -> int:
        """Number of workers that share the envs."""
        return self._engine.pool.num_workers

    @property
    def para_mode(self) -> str:
        """The mode that was given, the mode that ``"auto"`` chose, or the name of the backend class."""
        return self._para_mode

    @property
    def asynchronous(self) -> str | None:
        """The done policy that was given.

        If an adapter is in use, its rules apply instead, and this property names the call that made the adapter, such
        as ``"to_sb3()"``.
        """
        return self._engine.adapter or self._engine.done_policy.word

    @property
    def recommendation(self) -> Recommendation | None:
        """The mode that ``para_mode="auto"`` chose, with the reasons; ``None`` if another mode was given."""
        return self._recommendation

    @functools.cached_property
    def observation_spaces(self) -> list[Space | None]:
        """A list with the observation space of each env; ``None`` for an env that declares no observation space."""
        return [deepcopy(facts.observation_space) for facts in self._engine.pool.facts]

    @functools.cached_property
    def action_spaces(self) -> list[Space | None]:
        """A list with the action space of each env; ``None`` for an env that declares no action space."""
        return [deepcopy(facts.action_space) for facts in self._engine.pool.facts]

    @property
    def single_observation_space(self) -> Space | None:
        """The observation space that all envs share; ``None`` if the envs' spaces differ or are not declared."""
        return self._engine.pool.layout.observation_space

    @property
    def single_action_space(self) -> Space | None:
        """The action space that all envs share; ``None`` if the envs' spaces differ or are not declared."""
        return self._engine.pool.layout.action_space

    @functools.cached_property
    def observation_space(self) -> Space | None:
        """The space of a batch of observations of all envs; ``None`` if `single_observation_space` is ``None``."""
        return batched(self.single_observation_space, self._engine.num_envs)

    @functools.cached_property
    def action_space(self) -> Space | None:
        """The space of a batch of actions of all envs; ``None`` if `single_action_space` is ``None``."""
        return batched(self.single_action_space, self._engine.num_envs)

    @property
    def unwrapped(self) -> ParallelEnv:
        """This object itself; for a wrapper, the `ParallelEnv` inside the wrapper."""
        return self

    # ---------------------------------------------------------------- notebooks

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return the display of this object in a notebook, as text and as HTML.

        No worker is contacted, so even a busy, broken or closed object can be displayed.
        """
        return _notebook().mime_bundle(self)  # type: ignore[no-any-return]

    @single_threaded
    def show(self, id: Ids = None, *, width: int = 800) -> None:
        """Show the current frames of the envs below the notebook cell.

        A second call in the same cell replaces the frames of the first. Frames of several envs are tiled, with gaps
        between them, and each frame shows its env id.

        Args:
            id: The envs, which must have been made with ``render_mode="rgb_array"``. Their frames may differ in size.
            width: Maximum width in pixels; a wider picture is scaled down.

        Raises:
            UsageError: If the call is not made in a notebook.
            ArgumentError: If an env does not render pictures, for example because its ``render_mode`` is not
                ``"rgb_array"`` (nothing was drawn), or if the frames cannot be tiled (see `ParallelEnv.render`).
            ResetNeededError: If an env needs a reset before it can draw.
        """
        _notebook().show_envs(self, id, width)

    @single_threaded
    def play(
        self,
        policy: Policy,
        steps: int,
        *,
        id: Ids = None,
        seed: Seeds = None,
        fps: float | None = None,
        width: int = 800,
        progress: bool = True,
    ) -> Evaluation:
        """Run a policy, show the envs below the notebook cell while they step, and return statistics of their episodes.

        The envs are reset at the start, and need a reset afterwards. An env whose episode has ended is reset,
        regardless of ``asynchronous``. Interrupt the cell to stop early.

        Args:
            policy: See `ParallelEnv.run_episodes`.
            steps: Number of steps of each env.
            id: The envs.
            seed: Seed of the first reset; see `ParallelEnv.reset`.
            fps: Maximum number of frames per second. ``None``: the first env's ``metadata["render_fps"]`` or, if that
                is absent, 30.
            width: See `show`.
            progress: See `ParallelEnv.rollout`.

        Raises:
            UsageError: See `show`.
            ArgumentError: If an argument is invalid, or an env does not render pictures, for example because its
                ``render_mode`` is not ``"rgb_array"``; nothing was reset.
            EnvBusyError: See `ParallelEnv.step`.
            BaseException: Any exception raised by an env or the policy; ``error.partial`` holds the episodes that ended
                before the exception.
        """
        return _notebook().Performance(self, policy, steps, id, seed, fps, width, bool(progress)).play()  # type: ignore[no-any-return]

    @single_threaded
    def record(
        self,
        policy: Policy,
        steps: int,
        path: str | Path | None = None,
        *,
        id: Ids = None,
        seed: Seeds = None,
        fps: float | None = None,
        width: int = 640,
        progress: bool = True,
    ) -> Film:
        """Run a policy on the envs and return a film that a notebook can play. No screen is needed.

        The envs are reset at the start, and need a reset afterwards. An env whose episode has ended is reset,
        regardless of ``asynchronous``, so its next frame shows the first state of the next episode. All frames are kept
        in memory until the last step; at the default width, each takes about 0.8 MB. To film the steps of your own
        loop, use the wrapper `RecordVideo`.

        Args:
            policy: See `ParallelEnv.run_episodes`.
            steps: Number of steps of each env; the film has ``steps + 1`` frames.
            path: A file to which the film is also written. Its suffix gives the format: ``.webp``, ``.gif``, ``.png``
                (animated), or ``.mp4``, which needs imageio-ffmpeg. ``None``: no file is written; the film is an MP4 if
                imageio-ffmpeg is installed, else a WebP.
            id: The envs.
            seed: Seed of the first reset; see `ParallelEnv.reset`.
            fps: Frames per second; ``None``: see `play`. The maximum is 50 in a GIF and 90 in a WebP or PNG, because
                browsers slow faster animations down to 10 frames per second.
            width: Maximum width in pixels; wider frames are scaled down.
            progress: See `ParallelEnv.rollout`.

        Raises:
            MissingDependencyError: If the installed packages cannot write the format.
            ArgumentError: If an argument is invalid or an env does not render pictures, for example because its
                ``render_mode`` is not ``"rgb_array"`` (nothing was reset), or if a frame of the film is too large for
                the format.
            OSError: If the folder of ``path`` does not exist or ``path`` is not writable (nothing was reset), or if
                writing the film fails (``error.partial`` is the film).
            EnvBusyError: See `ParallelEnv.step`.
            BaseException: Any exception raised by an env or the policy; ``error.partial`` holds the episodes that ended
                before the exception.
        """
        return _notebook().Performance(self, policy, steps, id, seed, fps, width, bool(progress)).record(path)  # type: ignore[no-any-return]

    def profile(self) -> Recorder:
        """Return a context manager that records how the time is spent: ``with env.profile() as p``.

        After the block, ``p.summary()`` is a table with advice, ``p.plot()`` is a timeline that a notebook shows, and
        ``p.save("trace.json")`` writes a trace for Perfetto or Chrome. The record contains the steps and resets of each
        env and the caller's calls; each worker keeps only its latest million entries. In each step, recording takes
        about 4 us per worker and 0.6 us per env. If a worker dies, its records are lost, but the worker that replaces
        it is recorded.

        Raises:
            EnvBusyError: On entry, if this object is already being recorded.
            WorkerTimeoutError: On entry, if a worker is still busy after the ``timeout`` of the `ParallelEnv`.
        """
        return _notebook().Recorder(self)  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- other libraries

    def to_gymnasium(
        self,
        autoreset_mode: Literal["NextStep", "SameStep", "Disabled"] | str | gymnasium.vector.AutoresetMode = "NextStep",
        *,
        observation_mode: Literal["same", "different"] | Spaces = "same",
    ) -> GymnasiumVectorEnv:
        """Return a `gymnasium.vector.VectorEnv` that steps these envs, for any library that accepts one.

        This call resumes paused envs. Until its first reset, each env counts as being in the middle of an episode, so
        it may be stepped. ``autoreset_mode`` instead of ``asynchronous`` decides what happens when an episode ends.
        Closing the vector env closes this object. If this object was made with ``copy=False``, observations are like
        those of Gymnasium's own vector envs with ``copy=False``: valid until the next call, and writeable. Infos and
        ``final_obs`` are always copies.

        Args:
            autoreset_mode: ``"NextStep"``: in the step after the end of its episode, an env is reset, its action is
                ignored, and its reward is 0. ``"SameStep"``: the env is reset within the step that ends its episode;
                ``infos["final_obs"]`` and ``infos["final_info"]`` are the last observation and info of the episode.
                ``"Disabled"``: you reset the env, with ``reset(options={"reset_mask": terminations | truncations})``.
            observation_mode: ``"same"``: the envs share one observation space. ``"different"``: the envs' spaces have
                the same shapes and dtypes, but different bounds. You can also give a pair of your own spaces: the
                batched space and the single space.

        Raises:
            ArgumentError: If a mode is unknown, or if an env declares no spaces or declares spaces that
                ``observation_mode`` does not allow.
            EnvBusyError: If a step is in flight.
            WorkerTimeoutError: If an env is still in a call that timed out.
            UsageError: If another adapter already uses this object.
        """
        from parallelenv.adapters.gymnasium import GymnasiumVectorEnv

        return GymnasiumVectorEnv(self, autoreset_mode, observation_mode)

    def to_sb3(self) -> SB3VecEnv:
        """Return a `VecEnv` that steps these envs, for the algorithms and wrappers of Stable-Baselines3.

        This call resumes paused envs. Until its first reset, each env counts as being in the middle of an episode, so
        it may be stepped. An env whose episode ends is reset within the same step, regardless of ``asynchronous``.
        Closing the `VecEnv` closes this object. Observations are copied, even if this object was made with
        ``copy=False``, because Stable-Baselines3's algorithms keep the latest observations during a step: without a
        copy, the step would overwrite these observations, and the algorithms would learn from the wrong ones.

        Raises:
            MissingDependencyError: If Stable-Baselines3 is not installed.
            ArgumentError: If the envs declare no spaces, declare different spaces, or have different render modes.
            EnvBusyError: If a step is in flight.
            WorkerTimeoutError: If an env is still in a call that timed out.
            UsageError: If another adapter already uses this object.
        """
        try:
            from parallelenv.adapters.sb3 import SB3VecEnv
        except ModuleNotFoundError as error:
            if error.name != "stable_baselines3":
                raise
            raise MissingDependencyError(
                "to_sb3() needs the package stable-baselines3, which is not installed. Install it with: "
                "pip install stable-baselines3"
            ) from None
        return SB3VecEnv(self)

    def to_tianshou(self, wait_num: int | None = None, timeout: float | None = None) -> TianshouVectorEnv:
        """Return a vector env for Tianshou's collectors and wrappers.

        This call resumes paused envs. Until its first reset, each env counts as being in the middle of an episode, so
        it may be stepped. Regardless of ``asynchronous``, an env is not reset when its episode ends, because Tianshou's
        collectors reset the envs. Closing the vector env closes this object. Observations are copied, even if this
        object was made with ``copy=False``.

        Args:
            wait_num: Number of envs that a step waits for while the other envs continue. ``None``: all envs.
            timeout: Seconds after which a step returns the results that have arrived; if there are none, the step waits
                for one result. ``None``: no limit.

        Warns:
            UserWarning: If either argument is given and envs share workers; envs in the same worker wait for each
                other.

        Raises:
            ArgumentError: If ``wait_num`` is not an int from 1 to the number of envs, or ``timeout`` is not positive.
            InvalidEnvError: If an env has a `Tuple` observation space, which Tianshou cannot batch.
            EnvBusyError: If a step is in flight.
            WorkerTimeoutError: If an env is still in a call that timed out.
            UsageError: If another adapter already uses this object.
        """
        from parallelenv.adapters.tianshou import TianshouVectorEnv

        return TianshouVectorEnv(self, wait_num, timeout)

    # ---------------------------------------------------------------- attribute access, copying, repr

    if not TYPE_CHECKING:  # otherwise, a type checker would allow any name to be set

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute; refuse unknown public names, because setting them would have no effect.

            Raises:
                AbsentAttributeError: If no public attribute has this name, or the attribute is read-only. Instances of
                    subclasses skip this check.
            """
            known = getattr(ParallelEnv, name, property())
            is_fixed = isinstance(known, (property, functools.cached_property)) and getattr(known, "fset", None) is None
            if is_fixed and not name.startswith("_") and type(self) is ParallelEnv:
                raise unsettable_attribute(self, name, name in inspect.signature(ParallelEnv).parameters)
            object.__setattr__(self, name, value)

    if not TYPE_CHECKING:  # otherwise, a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Refuse an unknown name, and suggest a known name with the same meaning. No worker is contacted.

            Raises:
                AttributeError: Always; an `AbsentAttributeError` for a public name.
            """
            if name.startswith("_"):  # copy, pickle and notebooks probe for such names
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            if hasattr(type(self), name):  # a property raised an AttributeError: raise it again
                return object.__getattribute__(self, name)
            raise absent_attribute(self, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnpicklableError(
            "A ParallelEnv cannot be copied or pickled: its workers belong to one object in one process. Make another "
            "one from the same list of env fns. To continue from its state: other.load_state(env.save_state()). The "
            "result of save_state() can be pickled."
        )

    def __len__(self) -> int:
        return self._engine.num_envs

    def __repr__(self) -> str:
        if not hasattr(self, "_engine"):
            return "<parallelenv.ParallelEnv, not constructed>"
        chosen = self._recommendation
        mode = repr(self._para_mode) if chosen is None else f"{registry.AUTO!r} ({chosen.label})"
        parts = ["closed"] if self.closed else [count(self.num_workers, "worker"), self._engine.pool.backend.placement]
        return (
            f"<parallelenv.ParallelEnv of {count(self._engine.num_envs, 'env')}, para_mode={mode}, "
            f"asynchronous={self.asynchronous!r}, {', '.join(filter(None, parts))}>"
        )

    # ---------------------------------------------------------------- closing

    def close(self, timeout: float | None = None) -> None:
        """Close all envs and stop all workers.

        Errors that envs raise while closing are ignored; repeated calls do nothing.

        Args:
            timeout: Seconds that workers have to close their envs before the workers are terminated; ``None`` means 3.

        Raises:
            ArgumentError: If ``timeout`` is not a valid number of seconds; nothing was closed.
        """
        grace = arguments.check_grace(timeout, CLOSE_TIMEOUT)
        if hasattr(self, "_engine"):
            self._engine.close(grace)

    @classmethod
    def close_all(cls) -> None:
        """Close every `ParallelEnv` of this process that is still open.

        Raises:
            BaseExceptionGroup: If calls of `close` raised errors. The group contains all of them, and is raised after
                every `ParallelEnv` has been closed.
        """
        errors: list[BaseException] = []
        for env in list(cls._live):
            try:
                env.close()
            except BaseException as error:  # noqa: BLE001 (raised below, after all objects are closed)
                errors.append(error)
        for one in errors:
            if signal_behind(one) is not None:
                raise one
        if errors:
            raise BaseExceptionGroup("Errors were raised while closing.", errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _notebook() -> ModuleType:
    """Return `parallelenv.notebook`. It is in a layer above this module, so it is imported only when needed."""
    from parallelenv import notebook

    return notebook


# `ParallelEnv.make` takes ``**kwargs``. The signature set here shows editors and `help` what these can be. It lists the
# first three parameters of `make`, the constructor's parameters except ``envs``, ``para_mode`` and the options, and the
# last two parameters of `make`.
_OWN, _WHOLE = (list(inspect.signature(one).parameters.values()) for one in (ParallelEnv.make, ParallelEnv))
_ARGUMENTS = tuple(one.name for one in _WHOLE[:-1])  # without the last one, ``backend_options``
_SIGNATURE = inspect.Signature([*_OWN[:3], *_WHOLE[2:-1], *_OWN[-2:]])
_MAKE_ARGUMENTS = tuple(_SIGNATURE.parameters)[:-1]
_CLS = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)
vars(ParallelEnv)["make"].__func__.__signature__ = _SIGNATURE.replace(
    parameters=[_CLS, *_SIGNATURE.parameters.values()]
)

atexit.register(ParallelEnv.close_all)
