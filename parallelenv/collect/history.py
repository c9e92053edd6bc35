"""The history of a collector: how the mean return of its episodes changes with the number of samples and with time."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import count, show
from parallelenv.errors import ArgumentError, MissingDependencyError


class Record(NamedTuple):
    """A collection or an evaluation.

    Attributes:
        samples: Total number of env steps collected so far.
        seconds: Total time spent on collecting so far.
        version: Version of the policy.
        episodes: Number of episodes that ended in this collection or evaluation.
        mean_return: Mean return of these episodes; nan if there are no episodes, or if rewards are not numbers.
        is_test: Whether this is an evaluation.
    """

    samples: int
    seconds: float
    version: int
    episodes: int
    mean_return: float
    is_test: bool


class History:
    """All collections and evaluations so far, oldest first.

    Args:
        log_dir: Folder for TensorBoard logs, which need ``tensorboardX``, or ``tensorboard`` and torch. If ``None``, no
            logs are written.
    """

    def __init__(self, log_dir: object = None) -> None:
        self._records: list[Record] = []
        self._samples, self._seconds = 0, 0.0
        self._writer: Any = None
        if log_dir is None:
            return
        for module in ("tensorboardX", "torch.utils.tensorboard"):
            try:
                self._writer = importlib.import_module(module).SummaryWriter(str(log_dir))
                return
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in ("tensorboardX", "tensorboard", "torch"):
                    raise
        raise MissingDependencyError(
            f"log_dir={show(log_dir)} needs the package 'tensorboardX', or 'tensorboard' and torch. Install it with: "
            "pip install tensorboardX"
        )

    def note(
        self, returns: Array, version: int, samples: int = 0, seconds: float = 0.0, *, is_test: bool = False
    ) -> None:
        """Add a collection or an evaluation. For an evaluation, leave ``samples`` and ``seconds`` at 0."""
        self._samples += samples
        self._seconds += seconds
        mean = float(returns.mean()) if returns.size and returns.dtype != object else math.nan
        record = Record(self._samples, self._seconds, version, len(returns), mean, is_test)
        self._records.append(record)
        if self._writer is None:
            return
        kind, names = ("test", []) if is_test else ("train", ["seconds", "version"])
        for name in ("episodes", *names, *([] if math.isnan(mean) else ["mean_return"])):
            self._writer.add_scalar(f"{kind}/{name}", getattr(record, name), self._samples)

    def close(self) -> None:
        """Close the TensorBoard writer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records))

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def __repr__(self) -> str:
        return f"<History of {count(len(self), 'record')}, {self._samples:,} samples in {self._seconds:.1f} s>"

    def plot(self, axes: object = None) -> Any:
        """Plot mean returns against samples and against seconds, with collections as a line and evaluations as dots.

        Args:
            axes: Two matplotlib axes; ``None`` makes a new figure.

        Returns:
            The figure.

        Raises:
            MissingDependencyError: If matplotlib is not installed.
            ArgumentError: If ``axes`` is not a pair of axes.
        """
        if axes is None:  # without pyplot, which would keep the figure; notebooks would then show it twice
            figure = import_package("matplotlib.figure", "plot()").Figure

            def as_png(self: Any) -> bytes:
                content = io.BytesIO()
                self.savefig(content, format="png", dpi=80)
                return content.getvalue()

            picture: Any = type("Picture", (figure,), {"_repr_png_": as_png})
            axes = picture(figsize=(9, 3), layout="constrained").subplots(1, 2)
        pair: list[Any] = list(axes) if isinstance(axes, Iterable) else [axes]
        if len(pair) != 2 or not all(hasattr(one, "plot") for one in pair):
            raise ArgumentError(f"axes={show(axes)} are not two axes of matplotlib: for samples and for seconds.")
        for axis, name in zip(pair, ("samples", "seconds"), strict=True):
            for is_test, style, label in ((False, "-", "collected"), (True, "o", "evaluated")):
                chosen = [one for one in self if one.is_test is is_test and not math.isnan(one.mean_return)]
                if chosen:
                    returns = [one.mean_return for one in chosen]
                    axis.plot([getattr(one, name) for one in chosen], returns, style, label=label)
            axis.set_xlabel(name)
            axis.set_ylabel("mean return")
            if axis.get_legend_handles_labels()[0]:
                axis.legend()
        return pair[0].figure


def import_package(module: str, purpose: str) -> Any:
    """Return a module of an optional package; raise `MissingDependencyError` if the package is not installed."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingDependencyError(
            f"{purpose} needs the package {package!r}, which is not installed. Install it with: pip install {package}"
        ) from error
