"""Notebook output: pictures and films of envs, profiles, and the representation of a `ParallelEnv`."""

from parallelenv.notebook.film import picture_of
from parallelenv.notebook.profile import Recorder
from parallelenv.notebook.repr import mime_bundle
from parallelenv.notebook.show import Performance, show_envs

__all__ = ["Performance", "Recorder", "mime_bundle", "picture_of", "show_envs"]
