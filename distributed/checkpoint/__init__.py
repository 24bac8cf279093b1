"""Checkpoints without a layout: saved in the background, whole or not at all, loaded by any other layout."""

from distributed.checkpoint.checkpointer import Checkpointer
from distributed.checkpoint.files import CheckpointError, read_manifest

__all__ = ["CheckpointError", "Checkpointer", "read_manifest"]
