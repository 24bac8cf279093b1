"""A job of `bucket_sweep.py`: steps with buckets of several sizes in turn. Rank 0 prints a line of JSON.

mpirun -n 2 python benchmarks/bucket_sweep_job.py plain --seconds 60
benchmarks/two_hosts --rate 100mbit mpirun -n 2 python benchmarks/bucket_sweep_job.py int4 --seconds 60
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

import argparse
import json
import time

from ddp_minigrad import GPTSteps
from engine_jobs import BATCH
from slow_link_job import METHODS

from distributed import world
from distributed.data_parallel.bucket_size import choose_bucket_bytes
from distributed.data_parallel.comm_hooks import allreduce

SIZE = "nano-cpu"
KIBIBYTES = (64, 128, 256, 384, 512, 768, 1024, 2048, 4096)  # the last one is all gradients but the edges
STEPS_A_TURN = 2
WARMUP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hook", choices=["plain", "int4"], help="how gradients travel")
    parser.add_argument("--seconds", type=float, required=True, help="of all, about")
    args = parser.parse_args()
    start = time.perf_counter()
    comm = world()
    steps = GPTSteps(comm, SIZE, BATCH[SIZE])
    make = METHODS[args.hook].hook
    choice = choose_bucket_bytes(comm, steps.parameters(), steps.backward_seconds(), make() if make else allreduce)
    variants, num_buckets = {}, {}
    chosen = choice.bucket_bytes
    cuts: dict[tuple[int, ...], int] = {}  # sizes by how they cut the model
    for bucket_bytes in [kib << 10 for kib in KIBIBYTES] + [choice.bucket_bytes]:
        step, ddp = steps.hooked(make() if make else None, bucket_bytes)
        cut = tuple(bucket.range.stop for bucket in ddp.buckets.buckets)
        if cut in cuts:
            chosen = cuts[cut] if bucket_bytes == choice.bucket_bytes else chosen
            continue
        cuts[cut] = bucket_bytes
        variants[bucket_bytes], num_buckets[bucket_bytes] = step, len(cut)
    taken: dict[int, list[float]] = {size: [] for size in variants}
    for step in variants.values():
        for _ in range(WARMUP_STEPS):
            step()
    while not comm.broadcast_object(time.perf_counter() - start > args.seconds):
        for size, step in variants.items():
            for _ in range(STEPS_A_TURN):
                comm.barrier()
                began = time.perf_counter()
                step()
                taken[size].append(time.perf_counter() - began)
    by_rank = comm.gather_objects(taken)
    if comm.rank == 0:
        seconds = {size: list(map(max, *(rank[size] for rank in by_rank))) for size in taken}
        print(json.dumps({"seconds": seconds, "num_buckets": num_buckets, "chosen": str(chosen), "words": str(choice)}))


if __name__ == "__main__":
    main()
