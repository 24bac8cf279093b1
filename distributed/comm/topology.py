"""What a start line says of the ranks: where they run, with how many threads and cores, and what is wrong with that.

Ranks that share a core, and more threads than cores, are slow and raise no error, so the line warns. Only `this_place`
looks at the machine; the words are a function of what it found on every rank.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from minigrad import kernels
from minigrad.backend import gpu_name
from minigrad.words import counted

# What limits the threads of a matrix product; the first that is set holds, as in OpenBLAS, which NumPy's wheels bring.
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class RankPlace(NamedTuple):
    """What one rank runs on.

    Attributes:
        host: its name.
        cores: the numbers of those that this rank may use; empty where the system does not say (macOS).
        num_threads: of a matrix product.
        device: the name of a GPU, or `cpu` and which kernels it computes with.
    """

    host: str
    cores: frozenset[int]
    num_threads: int
    device: str


def this_place(device: str) -> RankPlace:
    """Look at what this process runs on.

    Args:
        device: where its arrays are: "cpu", or "cuda" for the current GPU.
    """
    cores = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())
    num_threads = blas_threads(len(cores) or os.cpu_count() or 1)
    gpu = device == "cuda"
    name, means = (gpu_name(), kernels.describe_gpu()) if gpu else (device, kernels.describe())
    return RankPlace(platform.node(), cores, num_threads, f"{name} with {means}")


def blas_threads(num_cores: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return how many threads a matrix product takes.

    One a core, or fewer if the environment says so. Read off the variables alone: what a program tells its BLAS when it
    runs is not seen.
    """
    numbers = (re.match(r"\d+", environ.get(variable, "")) for variable in _THREAD_VARIABLES)
    limits = [int(number[0]) for number in numbers if number and int(number[0]) > 0]
    return min([num_cores, *limits[:1]])


def describe_places(places: Sequence[RankPlace], library: str) -> str:
    """Describe the places of all ranks, and warn where ranks are in each other's way.

        1 rank, no MPI, 2 threads and 2 cores, cpu with numba kernels
        4 ranks on 2 hosts, Open MPI v5.0.11, 1 thread and 2-8 cores a rank, NVIDIA A100
        4 ranks on 1 host, MPICH 4.3.2, 2 threads and 2 cores a rank, cpu with NumPy kernels; warning: ...

    Args:
        places: by rank.
        library: what carries the messages.
    """
    num_hosts = len({place.host for place in places})
    where, each = (f" on {counted(num_hosts, 'host')}", " a rank") if len(places) > 1 else ("", "")
    means = _count_range([place.num_threads for place in places], "thread")
    if all(place.cores for place in places):
        means += " and " + _count_range([len(place.cores) for place in places], "core")
    devices = " and ".join(dict.fromkeys(place.device for place in places))
    warning = _describe_crowding(places)
    return f"{counted(len(places), 'rank')}{where}, {library}, {means}{each}, {devices}" + (
        warning and f"; warning: {warning}"
    )


def short_name(library_version: str) -> str:
    """Return the name and the version in what an MPI says of itself.

    That may be pages about its build. "MPICH Version:      5.0.2\nMPICH Release date: ..."  ->  "MPICH 5.0.2"
    """
    line = library_version.partition("\n")[0]
    line = re.sub(r"^MPI VERSION\s*:\s*", "", line)  # Cray's heading, before the name
    line = re.split(r",| for | \(ANL ", line)[0]  # then: package, operating system, the MPICH that it is made from
    return re.sub(r"\s+version\s*:?\s*", " ", line, flags=re.IGNORECASE).strip()


def _describe_crowding(places: Sequence[RankPlace]) -> str:
    """Say where the most threads run on a core, if that is more than one; nothing otherwise."""
    spots = {
        (host, cores): [place for place in places if place.host == host and place.cores <= cores]
        for host, cores in dict.fromkeys((place.host, place.cores) for place in places if place.cores)
    }
    crowding, warning = 1.0, ""
    for (host, cores), inside in spots.items():
        num_threads = sum(place.num_threads for place in inside)
        if num_threads / len(cores) > crowding:
            crowding = num_threads / len(cores)
            on_host = f" of {host}" if len({place.host for place in places}) > 1 else ""
            warning = f"{counted(num_threads, 'thread')} on {counted(len(cores), 'core')}{on_host}"
            if len(cores) == 1 and len(inside) > 1:  # bound to it by a launcher, one by one
                warning = f"{len(inside)} ranks share core {min(cores)}{on_host}: start with --bind-to none"
    return warning


def _count_range(numbers: Collection[int], noun: str) -> str:
    low, high = min(numbers), max(numbers)
    return counted(low, noun) if low == high else f"{low}-{high} {noun}s"
