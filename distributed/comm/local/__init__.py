"""Ranks that are threads of one process."""

from distributed.comm.local.communicator import LocalCommunicator, LocalWorld
from distributed.comm.local.job import Killed

__all__ = ["Killed", "LocalCommunicator", "LocalWorld"]
