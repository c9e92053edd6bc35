"""Adapts a vector env in the user's list of envs. The sub-envs step together, and each sub-env has an env id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from parallelenv.contract.attributes import ABSENT, look_up
from parallelenv.contract.batch import Array, Index
from parallelenv.contract.copying import Broadcast, deep_copy, dumps
from parallelenv.contract.env_specs import layers
from parallelenv.contract.error_text import show
from parallelenv.contract.protocol import NOTHING, Extra, GroupFacts, Lookup, MethodCall
from parallelenv.contract.spaces import Action, Info, State, casts_to, pick_rows
from parallelenv.contract.tensors import as_array, is_dlpack
from parallelenv.errors import AbsentAttributeError, EnvContractError
from parallelenv.worker import env_adapter
from parallelenv.worker.row_writer import RowWriter, store_info
from parallelenv.worker.running_command import RunningCommand, Share

if TYPE_CHECKING:
    from parallelenv.worker.host import Host

_OF_ENVPOOL = frozenset({"env_id", "players"})
"""Keys of infos in which EnvPool numbers its sub-envs. These infos are left out, because the user has env ids."""
_AT_END = "final_obs", "final_info", "_final_obs", "_final_info"
"""Keys of the infos about the last step of an episode, from a vector env that resets sub-envs within that step."""


class EnvGroup:
    """Resets, steps and calls the sub-envs of a vector env, and writes their results to rows of the batch.

    There are three kinds of vector env. `SyncVectorEnv` and `AsyncVectorEnv` take a list of seeds and
    ``options["reset_mask"]``. EnvPool's vector envs can step and reset selected sub-envs, which are given by number;
    these vector envs keep the seed that they were made with. All other vector envs are used only as Gymnasium's
    documentation describes: with one seed, and with the mask only if their autoreset mode is ``"Disabled"``.

    The methods that execute commands return a dict that maps env ids to the envs' values for the reply. Envs without a
    value are left out.

    Attributes:
        oddity: Two clauses for a warning: how the vector env differs from others, and the consequence; empty if there
            is nothing to warn about.
        has_stepped: Whether the vector env has stepped since it was built. If it has not, it does not know which
            episodes ended before it was built.
    """

    has_stepped = False
    _has_failed = False

    def __init__(self, env: VectorEnv) -> None:
        core: Any = env.unwrapped
        self.env: Any = env
        self.oddity: tuple[str, str] | tuple[()] = ()
        self._is_envpool = hasattr(core, "all_env_ids") and hasattr(core, "async_reset")
        takes_numbers = self._is_envpool and core is env  # Gymnasium's wrappers do not pass on the numbers
        self._is_of_envs = isinstance(core, (SyncVectorEnv, AsyncVectorEnv))
        declared = (env.metadata or {}).get("autoreset_mode")
        try:
            mode = AutoresetMode(declared or AutoresetMode.NEXT_STEP)  # Gymnasium's default
        except ValueError:
            known = [one.value for one in AutoresetMode]
            raise EnvContractError(
                f"{type(core).__name__} has autoreset_mode={show(declared)} in its metadata; expected one of {known}."
            ) from None
        is_disabled = mode is AutoresetMode.DISABLED
        self.facts = GroupFacts(
            env.num_envs,
            type(core).__name__,
            mode.value,
            steps_some=takes_numbers,
            resets_some=takes_numbers or self._is_of_envs or is_disabled,
            steps_ended=is_disabled and not self._is_of_envs,  # Gymnasium's own raise an AssertionError
            is_assumed=declared is None,
            seeds_each=self._is_of_envs or self._is_envpool,  # EnvPool ignores the seeds
        )
        if env.num_envs < 1:
            raise EnvContractError(f"{self.facts.name} has no envs.")
        if self._is_envpool and core.config["batch_size"] != env.num_envs:
            raise EnvContractError(
                f"{self.facts.name} was made with batch_size={core.config['batch_size']} and num_envs={env.num_envs}, "
                "so its steps return only some of its envs. Leave out batch_size, and use send() and recv()."
            )

    def run(self, share: Share, each: Any, host: Host, running: RunningCommand) -> dict[int, Any]:
        """Run a command for the sub-envs of a share. ``each`` contains the command's argument for each of them.

        Results are written with ``host.writer``. This attribute is read anew after each call to the vector env, because
        a host that was abandoned during the call has a different writer afterwards.
        """
        operation, common = running.command.operation, running.command.common
        try:
            if operation == "step":
                return self.step(share, each, host, running)
            if operation == "reset":
                return self.reset(share, each, host)
            if operation == "get":
                return self.get(share, each, common, running)
            if operation == "set":
                running.doing = f"the setting of {common!r}"
                return self.set(share, each, common)
            calls = [MethodCall(*common.call())] if isinstance(common, Broadcast) else list(each or (common,))
            running.doing = calls[0].name + "()"
            return self.call(share, calls)
        except BaseException:
            self._has_failed = True
            raise

    def close(self) -> None:
        """Close the vector env.

        After a failure, terminate an `AsyncVectorEnv`, which would otherwise wait forever if one of its workers has
        died.
        """
        options = {"terminate": True} if self._has_failed and isinstance(self.env.unwrapped, AsyncVectorEnv) else {}
        self.env.close(**options)

    # ---------------------------------------------------------------- resets and steps

    def reset(self, share: Share, each: Sequence[tuple[int | None, Info | None]], host: Host) -> dict[int, Extra]:
        """Reset sub-envs and write their first states."""
        options = each[0][1]
        if options and "reset_mask" in options:
            raise EnvContractError("options['reset_mask'] was given. Give the envs to reset as id: reset(id=mask).")
        if any(other is not options and dumps(other) != dumps(options) for _, other in each):
            raise EnvContractError(f"{self.facts.name} takes the same options for all of its envs.")
        states, infos, indices = self._reset(share.numbers, [seed for seed, _ in each], deep_copy(options))
        loose = self._store_states(host.writer, share.env_ids, share.rows, states, indices)
        of_each = zip(share.env_ids, self._split(infos, indices), loose, strict=True)
        return {env_id: Extra(info or None, leaves) for env_id, info, leaves in of_each if info or leaves}

    def reset_instead(self, share: Share, each: object, host: Host, running: RunningCommand) -> dict[int, Extra]:
        """Reset sub-envs instead of stepping them. The host has already set their flags to False."""
        running.doing = "reset"
        values = self.reset(share, [(None, None)] * len(share.env_ids), host)
        host.writer.batch.rewards[share.rows] = 0.0
        running.doing = "step"
        self.has_stepped = True
        return values

    def _reset(
        self, numbers: Sequence[int] | None, seeds: Sequence[int | None] = (), options: Info | None = None
    ) -> tuple[State, Info, Sequence[int]]:
        """Reset the sub-envs with these numbers; ``None`` means all sub-envs.

        Returns:
            The states, the infos, and the index of each of these sub-envs in the states and infos.
        """
        size = self.facts.num_envs
        chosen = range(size) if numbers is None else numbers
        indices: Sequence[int] = chosen
        is_seeded = any(seed is not None for seed in seeds)
        arguments: list[Any] = []
        named: dict[str, Any] = {}
        if self._is_envpool:
            if is_seeded:
                self.oddity = (
                    "keeps the seed that EnvPool was made with",
                    "The seed of reset() has no effect: give one to envpool.make_gymnasium()",
                )
            if self.facts.steps_some:
                arguments, indices = [np.array(chosen, np.int32)], range(len(chosen))
        else:
            if numbers is not None:
                mask = np.zeros(size, bool)
                mask[list(numbers)] = True
                options = {**(options or {}), "reset_mask": mask}
            seed: Any = seeds[0] if is_seeded else None  # sub-env i gets it plus i; the caller has checked the seeds
            if is_seeded and self._is_of_envs:
                seed = [None] * size
                for number, one in zip(chosen, seeds, strict=True):
                    seed[number] = one
            named["seed"] = seed
        result = self.env.reset(*arguments, **named, options=options)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise EnvContractError(f"reset() of {self.facts.name} returned {show(result)}, not states and infos.")
        return result[0], dict(result[1]), indices

    def step(
        self, share: Share, each: Sequence[Action] | None, host: Host, running: RunningCommand
    ) -> dict[int, Extra]:
        """Step sub-envs and write the results."""
        states, outcomes, infos, indices = self._step(self._actions(share, each, host.writer), share.numbers)
        self.has_stepped, writer = True, host.writer
        loose = self._store_states(writer, share.env_ids, share.rows, states, indices)
        writer.store_outcomes(share.rows, *outcomes)
        ended: list[int] = []  # positions of envs that start their next episode within this step
        if running.command.autoreset:
            ended = np.flatnonzero(writer.batch.flags[share.rows].any(axis=1)).tolist()
        resets_itself = bool(ended) and self.facts.autoreset == AutoresetMode.SAME_STEP.value
        at_end = {key: infos.pop(key) for key in _AT_END if resets_itself and key in infos}
        values: dict[int, Extra] = {}
        columns = self._columns(infos, indices)  # to write all infos at once, if possible
        are_stored = columns is not None and (
            not columns or (writer.infos is not None and writer.infos.write_rows(share.rows, columns))
        )
        if not are_stored or writer.has_loose:
            own_infos = [{}] * len(loose) if are_stored else self._split(infos, indices)
            for env_id, info, leaves in zip(share.env_ids, own_infos, loose, strict=True):
                left = store_info(writer.infos, env_id - writer.first, info)
                if left or leaves:
                    values[env_id] = Extra(left, leaves)
        if resets_itself:
            # The vector env itself has reset the sub-envs in `ended`. The infos, rows and `values` are those of the
            # resets; `at_end` contains the infos of the last steps.
            if "final_obs" not in at_end:
                raise EnvContractError(
                    f"{self.facts.name} has the autoreset mode SameStep, but its infos lack 'final_obs', the last "
                    "states."
                )
            env_ids = [share.env_ids[position] for position in ended]
            chosen = [indices[position] for position in ended]
            last_infos = self._split({"info": at_end.get("final_info", {})}, chosen)
            for env_id, index, last_info in zip(env_ids, chosen, last_infos, strict=True):
                row, extra = env_id - writer.first, values.get(env_id, NOTHING)
                last_loose = writer.store_ended(row, pick_rows(at_end["final_obs"], index))
                writer.batch.drop_infos([row])
                info = store_info(writer.infos, row, last_info.get("info"))
                values[env_id] = Extra(info, extra.loose, ended_loose=last_loose)
            self._store_reset_infos(writer, env_ids, self._split(infos, chosen), values)
        elif ended:
            running.doing = "reset"
            self._begin_next(host, share, ended, values)
            running.doing = "step"
        return values

    def _step(self, actions: Action, numbers: Sequence[int] | None) -> tuple[State, list[Any], Info, Sequence[int]]:
        size = self.facts.num_envs
        if numbers is None:
            result = self.env.step(actions)
        elif self.facts.steps_some:
            result = self.env.step(actions, np.array(numbers, np.int32))
        elif self.facts.steps_ended:  # the others have ended: they accept any action, and their results do not count
            given = list(iterate(batch_space(self.env.single_action_space, len(numbers)), actions))
            place = {number: index for index, number in enumerate(numbers)}
            items = [given[place.get(number, 0)] for number in range(size)]
            result = self.env.step(self._batch_actions(items))
        else:
            raise EnvContractError(f"{self.facts.name} steps only as a whole.")
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvContractError(f"step() of {self.facts.name} returned {show(result)}, which is not five items.")
        states, *outcomes, infos = result
        if not isinstance(infos, Mapping):
            raise EnvContractError(f"step() of {self.facts.name} returned the infos {show(infos)}; infos are a dict.")
        if numbers is None or self.facts.steps_some:
            return states, outcomes, dict(infos), range(size if numbers is None else len(numbers))
        return states, [_pick(one, numbers) for one in outcomes], dict(infos), numbers

    def _actions(self, share: Share, each: Sequence[Action] | None, writer: RowWriter) -> Action:
        """Return the share's actions as one batch, which shares no memory with the rows of the `Batch`."""
        if each is not None:
            return self._batch_actions(each)
        return writer.batch.layout.actions.join([array[share.rows].copy() for array in writer.batch.actions])

    def _batch_actions(self, items: Sequence[Action]) -> Action:
        space = self.env.single_action_space
        if space.shape is not None and space.dtype is not None:  # otherwise only NumPy checks the parts
            for item in items:
                if not casts_to(as_array(item), np.dtype(space.dtype)):
                    raise EnvContractError(f"The action {show(item)} does not fit {space}: its dtype would change it.")
        empty: Any = create_empty_array(space, len(items))
        return concatenate(space, items, empty)

    def _begin_next(self, host: Host, share: Share, ended: Sequence[int], values: dict[int, Extra]) -> None:
        writer = host.writer
        env_ids = tuple(share.env_ids[position] for position in ended)
        for env_id in env_ids:
            writer.keep_ended(env_id - writer.first)
            if env_id in values:
                values[env_id] = host.running.copied(values[env_id])
        numbers = ended if share.numbers is None else [share.numbers[position] for position in ended]
        states, infos, indices = self._reset(numbers)
        writer = host.writer
        loose = self._store_states(writer, env_ids, writer.batch.rows(env_ids), states, indices)
        for env_id, leaves in zip(env_ids, loose, strict=True):
            if leaves:
                values[env_id] = values[env_id]._replace(loose=leaves, ended_loose=values[env_id].loose)
        self._store_reset_infos(writer, env_ids, self._split(infos, indices), values)

    @staticmethod
    def _store_reset_infos(
        writer: RowWriter, env_ids: Sequence[int], infos: Sequence[Info], values: dict[int, Extra]
    ) -> None:
        for env_id, info in zip(env_ids, infos, strict=True):
            left = store_info(writer.reset_infos, env_id - writer.first, info)
            if left:
                values[env_id] = values.get(env_id, NOTHING)._replace(reset_info=left)

    def _store_states(
        self, writer: RowWriter, env_ids: Sequence[int], rows: Index, states: State, indices: Sequence[int]
    ) -> Sequence[list[Any] | None]:
        """Write the states at these indices to rows; return each state's loose leaves, or ``None`` if it has none."""
        is_part = not isinstance(indices, range)
        if not writer.has_loose:
            writer.store_states(rows, _pick(states, indices if is_part else None))
            return [None] * len(env_ids)
        items = list(iterate(batch_space(self.env.single_observation_space, self._size(indices)), states))
        return [
            writer.store_state(env_id - writer.first, deep_copy(items[index]))
            for env_id, index in zip(env_ids, indices, strict=True)
        ]

    # ---------------------------------------------------------------- infos

    def _columns(self, infos: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Array] | None:
        """Return infos as arrays with a row per env; ``None`` if a value is not an array or lacks some envs' rows."""
        columns: dict[str, Array] = {}
        size, bookkeeping = self._size(indices), self._bookkeeping(infos)
        for key, values in infos.items():
            if key in bookkeeping:
                if key[0] == "_" and not np.all(_pick(values, None if isinstance(indices, range) else indices)):
                    return None
            elif isinstance(values, np.ndarray) and values.dtype != object and values.shape[:1] == (size,):
                columns[key] = values if isinstance(indices, range) else values[list(indices)]
            else:
                return None
        return columns

    def _split(self, infos: Mapping[Any, Any], indices: Sequence[int]) -> list[Info]:
        each: list[Info] = [{} for _ in indices]
        size, bookkeeping = self._size(indices), self._bookkeeping(infos)
        for key, values in infos.items():
            if key in bookkeeping:
                continue
            if isinstance(values, Mapping):
                parts: Sequence[Any] = self._split(values, indices)
            elif isinstance(values, (list, tuple)) or getattr(values, "shape", None) or is_dlpack(values):
                given = values if isinstance(values, (np.ndarray, list, tuple)) else as_array(values)
                parts = [given[index] for index in indices] if len(given) == size else [values] * len(indices)
            else:
                parts = [values] * len(indices)
            mask = infos.get(f"_{key}")
            for info, index, part in zip(each, indices, parts, strict=True):
                if mask is None or mask[index]:
                    info[key] = part.copy() if isinstance(part, np.ndarray) else part
        return each

    def _size(self, indices: Sequence[int]) -> int:
        """Return the number of envs in the states and infos to which ``indices`` apply."""
        return len(indices) if isinstance(indices, range) else self.facts.num_envs

    def _bookkeeping(self, infos: Mapping[Any, Any]) -> frozenset[str]:
        """Return keys that belong to no info.

        For each key ``k``, ``f"_{k}"`` belongs to a mask of the envs that have the info ``k``. The other keys are
        EnvPool's own.
        """
        return frozenset(f"_{key}" for key in infos).union(_OF_ENVPOOL if self._is_envpool else ())

    # ---------------------------------------------------------------- attributes and methods

    def get(self, share: Share, each: Sequence[Any] | None, lookup: Lookup, running: RunningCommand) -> dict[int, Any]:
        """Look up an attribute or a wrapper of each env, as ``lookup`` describes. See `Host.get`."""
        numbers = range(self.facts.num_envs) if share.numbers is None else share.numbers
        keys = each or [lookup.key] * len(numbers)
        if lookup.how == "wrapper":
            outer, inner = env_adapter.wrappers(self.env), getattr(self.env.unwrapped, "envs", ())
            wrappers = [[*outer, *(env_adapter.wrappers(inner[number]) if inner else ())] for number in numbers]
            return {
                env_id: any(isinstance(wrapper, kind) for wrapper in own)
                for env_id, kind, own in zip(share.env_ids, keys, wrappers, strict=True)
            }
        if lookup.how == "hint" or (lookup.how == "exists" and not hasattr(self.env.unwrapped, "get_attr")):
            return {}
        found = {}
        for key in dict.fromkeys(keys):
            running.doing = f"the lookup of {key!r}"
            found[key] = self._attribute(key)
        values: dict[int, Any] = {}
        for env_id, key, number in zip(share.env_ids, keys, numbers, strict=True):
            value = found[key][number]
            if value is None and lookup.how == "required":
                raise AbsentAttributeError(f"The envs of {self.facts.name} have no attribute {key!r}.")
            if lookup.how == "exists":
                values[env_id] = value is not None
            elif value is not None:
                values[env_id] = value[0] if lookup.how == "required" else value
        return values

    def _attribute(self, key: str) -> list[tuple[Any] | None]:
        name, *rest = key.split(".")
        absent: list[tuple[Any] | None] = [None] * self.facts.num_envs
        # Checked first, because reading an absent attribute ends the workers of an `AsyncVectorEnv`.
        if self._is_of_envs and not all(self.env.unwrapped.call("has_wrapper_attr", name)):
            # `has_wrapper_attr` also takes a property that fails for absent. An `AsyncVectorEnv` has no `envs` to ask.
            for env in getattr(self.env.unwrapped, "envs", ()):
                for layer in layers(env):
                    look_up(layer, name)
            return absent
        try:
            values = self._each(name, self._method("get_attr", "attributes of its envs cannot be read")(name))
        except AttributeError as error:
            if isinstance(error, AbsentAttributeError) or error.name not in (None, name):
                raise
            return absent
        for inner in rest:
            values = [ABSENT if value is ABSENT else look_up(value, inner) for value in values]
        return [None if value is ABSENT else (value,) for value in values]

    def set(self, share: Share, values: Sequence[Any], key: str) -> dict[int, bool]:
        """Set an attribute of all sub-envs with the vector env's ``set_attr``; each sub-env gets its own value."""
        set_attr = self._method("set_attr", "attributes of its envs cannot be set")
        if "." in key:
            raise EnvContractError(f"{key!r} cannot be set in {self.facts.name}: its set_attr() takes a single name.")
        set_attr(key, [deep_copy(value) for value in values])
        return {}

    def call(self, share: Share, calls: Sequence[MethodCall]) -> dict[int, Any]:
        """Call a method of all sub-envs, with the same arguments, through the vector env's ``render`` or ``call``."""
        first = calls[0]
        if any(other is not first and dumps(other) != dumps(first) for other in calls):
            raise EnvContractError(
                f"{self.facts.name} calls a method of all its envs with the same arguments, but different arguments "
                "were given for its envs. Give the same arguments for all of them."
            )
        positional, named = deep_copy(tuple(first.positional)), deep_copy(dict(first.named))
        if first.name == "render":
            with env_adapter.alone_while_drawing():
                results = self.env.render(*positional, **named)
        else:
            call = self._method("call", "methods of its envs cannot be called")
            if "name" in named:
                raise EnvContractError(f"call() of {self.facts.name} cannot pass on an argument named 'name'.")
            results = call(first.name, *positional, **named)
        results = self._each(first.name + "()", results)
        numbers = range(self.facts.num_envs) if share.numbers is None else share.numbers
        return {env_id: results[number] for env_id, number in zip(share.env_ids, numbers, strict=True)}

    def _each(self, name: str, values: Any) -> Any:
        if not hasattr(values, "__len__") or len(values) != self.facts.num_envs:
            hint = " Make it with a render_mode that returns frames." if name == "render()" and values is None else ""
            raise EnvContractError(f"{name} of {self.facts.name} returned {show(values)}, not one item each.{hint}")
        return values

    def _method(self, name: str, consequence: str) -> Any:
        found = getattr(self.env, name, None) or getattr(self.env.unwrapped, name, None)  # wrappers lack it
        if not callable(found):
            raise AbsentAttributeError(f"{self.facts.name} has no {name}(), so {consequence}.")
        return found


def _pick(batch: Any, rows: Sequence[int] | None) -> Any:
    if rows is None:
        return batch
    if isinstance(batch, Mapping):
        return {key: _pick(part, rows) for key, part in batch.items()}
    if isinstance(batch, tuple) and not hasattr(batch, "shape"):
        return tuple(_pick(part, rows) for part in batch)
    return as_array(batch)[list(rows)]
