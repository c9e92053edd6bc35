"""Notebook display: pictures and films of envs, profiles, and the display of a `ParallelEnv`."""

from parallelenv.notebook.profile import Recorder
from parallelenv.notebook.repr import mime_bundle
from parallelenv.notebook.show import Performance, show_envs
from parallelenv.notebook.tiles import picture_of

__all__ = ["Performance", "Recorder", "mime_bundle", "picture_of", "show_envs"]
