"""Ranks with a GPU each, whose arrays travel through NCCL."""

from distributed.comm.nccl.communicator import NCCLCommunicator, with_nccl

__all__ = ["NCCLCommunicator", "with_nccl"]
