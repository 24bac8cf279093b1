"""Ranks that are threads of one process."""

from distributed.comm.local.communicator import LocalCommunicator
from distributed.comm.local.job import Killed
from distributed.comm.local.world import LocalWorld

__all__ = ["Killed", "LocalCommunicator", "LocalWorld"]
