"""What hands write that have learnt PyTorch, and what is written here: tables, and the errors that quote them.

There are no second names. A habit that has no meaning here is an AttributeError or a TypeError, and its one line says
what to write. docs/from-pytorch.md has the reasons.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

_NO_GRADIENT = "x.data.{name}(...): it has no gradient"
_IN_PLACE = "with minigrad.no_grad(): x += ..., or x.data = ..."

# Attributes of a tensor, beside the names of ops: `x.exp()` is `minigrad.exp(x)`.
TENSOR = {
    "backward": "minigrad.backward(x)",
    "numpy": "x.data, which is the array (on a GPU minigrad.backend.to_host(x.data))",
    "cpu": "minigrad.backend.to_host(x.data)",
    "cuda": "nn.ParamGetter(device='cuda') for a model, minigrad.backend.place(array, 'cuda') for data",
    "to": "x.astype(dtype), or nn.ParamGetter(device='cuda') where a model is made",
    "device": "minigrad.backend.xp_of(x.data), which is numpy or cupy",
    "is_cuda": "minigrad.backend.xp_of(x.data) is not numpy",
    "type": "x.astype(dtype)",
    "float": "x.astype(numpy.float32), or float(x) for a number",
    "double": "x.astype(numpy.float64)",
    "half": "x.astype(numpy.float16)",
    "bfloat16": "minigrad.precision.use_precision(params, 'bfloat16')",
    "long": "x.data.astype(numpy.int64)",
    "int": "x.data.astype(numpy.int32), or int(x) for a number",
    "bool": "x.data.astype(bool)",
    "tolist": "x.data.tolist()",
    "view": "x.reshape(...)",
    "view_as": "x.reshape(y.shape)",
    "reshape_as": "x.reshape(y.shape)",
    "flatten": "x.reshape(-1), or x.reshape(len(x), -1) from axis 1 on",
    "unflatten": "x.reshape(...)",
    "ravel": "x.reshape(-1)",
    "permute": "x.transpose(...)",
    "t": "x.T",
    "mT": "x.swapaxes(-1, -2)",
    "unsqueeze": "minigrad.expand_dims(x, axis)",
    "expand": "minigrad.broadcast_to(x, shape)",
    "expand_as": "minigrad.broadcast_to(x, y.shape)",
    "repeat": "minigrad.concatenate([x] * n, axis)",
    "tile": "minigrad.concatenate([x] * n, axis)",
    "contiguous": "nothing: no op needs it",
    "clone": "nothing: no op changes another's output; minigrad.Tensor(x.data.copy()) for a leaf of its own",
    "chunk": "x.split(n, axis)",
    "unbind": "list(x), or x[i]",
    "narrow": "x[start:stop]",
    "select": "x[i]",
    "index_select": "x[indices]",
    "gather": "x[numpy.arange(n), indices]",
    "take": "x[indices]",
    "masked_fill": "minigrad.where(mask, value, x)",
    "masked_select": "x[mask]",
    "tril": "minigrad.where(numpy.tri(n, dtype=bool), x, 0)",
    "triu": "minigrad.where(numpy.tri(n, k=-1, dtype=bool), 0, x)",
    "dim": "x.ndim",
    "numel": "x.size",
    "clamp": "x.clip(low, high)",
    "add": "x + y",
    "sub": "x - y",
    "mul": "x * y",
    "div": "x / y",
    "neg": "-x",
    "pow": "x ** y",
    "square": "x ** 2",
    "reciprocal": "1 / x",
    "matmul": "x @ y",
    "mm": "x @ y",
    "bmm": "x @ y",
    "mv": "x @ y",
    "dot": "x @ y",
    "eq": "x.data == y",
    "ne": "x.data != y",
    "lt": "x < y",
    "le": "x <= y",
    "gt": "x > y",
    "ge": "x >= y",
    **{
        name: _NO_GRADIENT.format(name=name)
        for name in ("all", "any", "argmax", "argmin", "argsort", "nonzero", "round")
    },
    **{
        name: f"numpy.{name}(x.data): it has no gradient"
        for name in ("ceil", "floor", "isfinite", "isinf", "isnan", "sign", "sort", "unique")
    },
    "topk": "numpy.argsort(x.data)[..., -k:]: it has no gradient",
    **dict.fromkeys(("add_", "sub_", "mul_", "div_", "clamp_", "copy_", "fill_", "zero_", "normal_"), _IN_PLACE),
    "requires_grad_": "x.requires_grad = True",
    "detach_": "x = x.detach()",
    "retain_grad": "a leaf in its place: x = minigrad.Tensor(x.data, requires_grad=True)",
    "register_hook": "minigrad.backward_with_hooks(loss, on_grad_ready=...), for parameters",
    "is_leaf": "x.node is None",
    "grad_fn": "x.node, or print(minigrad.Tape.of(x))",
}

# Attributes of a module.
MODULE = {
    "to": "nn.ParamGetter(device='cuda', dtype=...) where it is made",
    "cuda": "nn.ParamGetter(device='cuda') where it is made",
    "cpu": "nn.ParamGetter(device='cpu') where it is made",
    "float": "nn.ParamGetter(dtype=numpy.float32) where it is made",
    "double": "nn.ParamGetter(dtype=numpy.float64) where it is made",
    "half": "minigrad.precision.use_precision(model.parameters(), 'float16')",
    "bfloat16": "minigrad.precision.use_precision(model.parameters(), 'bfloat16')",
    "forward": "model(x), and name the method __call__ in a class of your own",
    "zero_grad": "optimizer.zero_grad()",
    "children": "model.members(), which are (name, module, parameter or buffer)",
    "named_children": "model.members(), which are (name, module, parameter or buffer)",
    "named_buffers": "model.buffers(); each has a name",
    "apply": "for module in model.modules(): ...",
    "add_module": "self.name = module, or a list or dict of modules",
    "register_module": "self.name = module, or a list or dict of modules",
    "register_buffer": "self.name = nn.Buffer(array, 'name')",
    "register_parameter": "self.name = param('name', shape, init)",
    "register_forward_hook": "minigrad.profile() or minigrad.detect_anomaly(), or a layer of your own",
    "register_full_backward_hook": "minigrad.backward_with_hooks(loss, on_grad_ready=...), for parameters",
    "requires_grad_": "for p in model.parameters(): p.requires_grad = False",
    "get_parameter": "dict(model.named_parameters())[name]",
    "get_submodule": "the attribute itself: model.layers[0].linear",
    "compile": "nothing; a training step on a GPU becomes one CUDA graph with minigrad.cuda_graph.CapturedStep",
    "share_memory": "nothing: ranks are processes, distributed.DistributedDataParallel",
    "device": "minigrad.backend.xp_of(p.data) of a parameter, which is numpy or cupy",
    "dtype": "p.dtype of a parameter",
}

GROUPS = "minigrad.optim.Groups(rule_of_others, minigrad.optim.Group(params, rule), ...)"

# Attributes of an optimizer.
OPTIMIZER = {
    "param_groups": f"optimizer.params and optimizer.rule, which may be {GROUPS}",
    "add_param_group": f"optim.Optimizer(params, rule) with all of them, the rule being {GROUPS}",
    "state": "dict(optimizer.state_arrays())",
    "state_dict": "dict(optimizer.state_arrays()), or distributed.checkpoint.Checkpointer for a run",
    "load_state_dict": "distributed.checkpoint.Checkpointer for a run",
}

_PARTIAL_STEP = "minigrad.backward(loss) for all losses of a step but the last, ddp.hooks(num_samples=of all) for that"

# Attributes of a DistributedDataParallel.
REPLICATED = {
    "module": "ddp.model",
    "no_sync": _PARTIAL_STEP,
    "require_backward_grad_sync": _PARTIAL_STEP,
    "register_comm_hook": "DistributedDataParallel(model, comm, comm_hook=...)",
    **{
        name: f"ddp.model.{name}(...)"
        for name in ("eval", "load_state_dict", "named_parameters", "parameters", "state_dict", "train")
    },
    "forward": "ddp.model(x)",
    "zero_grad": "optimizer.zero_grad()",
}

_NUMPY_ARRAYS = {name: f"numpy.{name}(...): every op takes arrays" for name in ("arange", "eye", "linspace")}
_NUMPY_LEAVES = {
    name: f"minigrad.Tensor(numpy.{name}(...)); every op takes arrays too"
    for name in ("empty", "full", "ones", "ones_like", "zeros", "zeros_like")
}
_RANDOM = dict.fromkeys(("rand", "randn", "randint", "randperm"), "numpy.random.default_rng(seed)")
_DTYPES = {
    name: f"numpy.{name}"
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
}

# Names of a package -> what to write, for each package.
PACKAGES = {
    "minigrad": {
        **_NUMPY_ARRAYS,
        **_NUMPY_LEAVES,
        **_RANDOM,
        **_DTYPES,
        "as_tensor": "minigrad.Tensor(data), or the array itself",
        "from_numpy": "minigrad.Tensor(array), or the array itself",
        "cat": "minigrad.concatenate",
        "clamp": "minigrad.clip",
        "permute": "minigrad.transpose",
        "unsqueeze": "minigrad.expand_dims",
        "mm": "minigrad.matmul",
        "bmm": "minigrad.matmul",
        "square": "x ** 2",
        "reciprocal": "1 / x",
        "split": "x.split(parts)",
        "chunk": "x.split(n)",
        "manual_seed": "nn.ParamGetter(seed=...) for weights, rng.scope(seed=..., step=...) for dropout",
        "save": "distributed.checkpoint.Checkpointer, or numpy.savez(path, **model.state_dict())",
        "load": "distributed.checkpoint.Checkpointer, or model.load_state_dict(numpy.load(path))",
        "compile": "nothing; a training step on a GPU becomes one CUDA graph with minigrad.cuda_graph.CapturedStep",
        "device": "nn.ParamGetter(device='cuda')",
        "cuda": "minigrad.backend.use_gpu(index), and nn.ParamGetter(device='cuda')",
        "inference_mode": "minigrad.no_grad()",
        "set_grad_enabled": "minigrad.no_grad() or minigrad.enable_grad()",
        "is_grad_enabled": "minigrad.autodiff.mode.is_recording()",
        "autograd": "minigrad.value_and_grad, and @minigrad.op for a derivative of your own",
        "autocast": "minigrad.precision.use_precision(params, 'bfloat16')",
        "utils": "distributed.data for batches, minigrad.recompute for checkpointing",
        "distributed": "the package distributed, which stands beside minigrad",
    },
    "minigrad.nn": {
        "functional": "minigrad.relu and the like: ops stand in minigrad itself",
        "CrossEntropyLoss": "minigrad.cross_entropy(logits, targets), a function",
        "MSELoss": "minigrad.mse(predictions, targets), a function",
        "BCEWithLogitsLoss": "minigrad.binary_cross_entropy_with_logits(logits, targets), a function",
        "NLLLoss": "minigrad.cross_entropy(logits, targets), which takes logits",
        "Softmax": "minigrad.softmax(x); cross_entropy takes logits",
        "LogSoftmax": "minigrad.log_softmax(x); cross_entropy takes logits",
        "Parameter": "param('name', shape, init) with the getter of the module, or minigrad.Parameter(array, 'name')",
        "ModuleList": "a list: self.layers = [...]",
        "ModuleDict": "a dict: self.layers = {...}",
        "ParameterList": "a list: self.weights = [...]",
        "ParameterDict": "a dict: self.weights = {...}",
        "Identity": "nothing, or lambda x: x",
        "BatchNorm1d": "nn.BatchNorm(param, width), for any number of axes",
        "BatchNorm2d": "nn.BatchNorm(param, width), for any number of axes",
        "BatchNorm3d": "nn.BatchNorm(param, width), for any number of axes",
        "MultiheadAttention": "nn.MultiHeadAttention, which is causal, or minigrad.scaled_dot_product_attention",
        "DataParallel": "distributed.DistributedDataParallel(model, comm)",
        "utils": "optim.clip_by_global_norm(params, max_norm), or Optimizer(..., max_norm=...)",
    },
    "minigrad.optim": {
        "lr_scheduler": "AdamW(lr=lr_schedule.warmup_cosine(...)): a rule takes a function of the step",
        "RMSprop": "a rule of your own, with init and update: see optim.Rule",
        "Adagrad": "a rule of your own, with init and update: see optim.Rule",
    },
}

# Keyword arguments, wherever they are none of ours.
OPTIONS = {
    "dim": "axis=",
    "dims": "axis= or axes=",
    "keepdim": "keepdims=",
    "unbiased": "ddof=1 (ours is 0, as NumPy's)",
    "correction": "ddof=",
    "dtype": "x.astype(dtype)",
    "out": "nothing: an op returns a new tensor",
    "inplace": "nothing: an op returns a new tensor",
    "kernel_size": "size=",
    "negative_slope": "slope=",
    "approximate": "exact=False or exact=True",
    "p": "rate=",
    "min": "low=",
    "max": "high=",
    "a_min": "low=",
    "a_max": "high=",
    "pad_width": "widths=",
    "lr": "the rule: optim.Optimizer(params, optim.AdamW(lr=...))",
    "retain_graph": "nothing: a tape is walked once, run the forward again",
    "create_graph": "nothing: derivatives are of first order",
    "gradient": "minigrad.backward_with_grad(y, cotangent)",
    "set_to_none": "nothing: zero_grad() marks gradients fresh, which is as cheap",
    "device_ids": "nothing: a model is made on its device, minigrad.backend.use_gpu(local_rank()) says which",
    "output_device": "nothing: a model is made on its device, minigrad.backend.use_gpu(local_rank()) says which",
    "process_group": "the communicator, in second place: DistributedDataParallel(model, world())",
    "find_unused_parameters": "nothing: which parameters a backward reaches is known when it starts",
    "static_graph": "nothing: which parameters a backward reaches is known when it starts",
    "gradient_as_bucket_view": "nothing: gradients lie in their buckets",
    "bucket_cap_mb": "bucket_bytes=",
    "broadcast_buffers": "buffers=",
    "strict": "nothing: names must match; merge two dicts to load a part, {**model.state_dict(), **part}",
    **dict.fromkeys(("input", "logits", "other", "target", "targets"), "the array in its place, by position"),
}

# NumPy's functions, beside those that have an op's name.
NUMPY = {
    "absolute": "minigrad.abs",
    "fabs": "minigrad.abs",
    "negative": "-x",
    "square": "x ** 2",
    "reciprocal": "1 / x",
    "dot": "x @ y",
    "inner": "x @ y",
    "amax": "minigrad.max",
    "amin": "minigrad.min",
    "vstack": "minigrad.concatenate",
    "hstack": "minigrad.concatenate",
    "atleast_2d": "minigrad.expand_dims",
    "ravel": "x.reshape(-1)",
    "log2": "minigrad.log(x) / math.log(2)",
    "log10": "minigrad.log(x) / math.log(10)",
    "exp2": "2 ** x",
    "tan": "minigrad.sin(x) / minigrad.cos(x)",
    "sinh": "(minigrad.exp(x) - minigrad.exp(-x)) / 2",
    "cosh": "(minigrad.exp(x) + minigrad.exp(-x)) / 2",
    "equal": "x.data == y",
    "not_equal": "x.data != y",
}

Function = TypeVar("Function", bound=Callable[..., Any])


class Foreign:
    """An attribute that is none.

    Reading it raises an AttributeError that says what to write.
    """

    def __init__(self, advice: str) -> None:
        self.advice = advice

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self.name!r}: write {self.advice}")


def teach(owner: type, table: Mapping[str, str]) -> None:
    """Let a class answer the names of a table that are none of its own.

    `dir` does not list them.

    Args:
        owner: the class.
        table: name -> what to write in its place.
    """
    foreign = {name: Foreign(advice) for name, advice in table.items() if not hasattr(owner, name)}
    for name, attribute in foreign.items():
        attribute.__set_name__(owner, name)
        setattr(owner, name, attribute)


def own_names(instance: Any) -> list[str]:
    """Return `dir(instance)` without what is foreign to its class."""
    foreign = {name for cls in type(instance).__mro__ for name, x in vars(cls).items() if isinstance(x, Foreign)}
    return [name for name in object.__dir__(instance) if name not in foreign]


def missing_name(package: str) -> Callable[[str], NoReturn]:
    """Return a package's `__getattr__`.

    It is asked for what the package does not have.
    """

    def __getattr__(name: str) -> NoReturn:  # noqa: N807
        advice = PACKAGES[package].get(name)
        raise AttributeError(f"{package} has no {name!r}" + (f": write {advice}" if advice else ""))

    return __getattr__


def check_options(name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise a TypeError if an option is none of those that `name` has.

    Args:
        name: of the function.
        given: the options of one call.
        known: those that it has.
    """
    for option in given:
        if option not in known:
            advice = OPTIONS.get(option, "")
            if not advice or (advice.endswith("=") and advice[:-1] not in known):
                raise TypeError(f"{name}() has no option {option!r}: it has {', '.join(known) or 'none'}")
            raise TypeError(f"{name}() has no option {option!r}: write {advice}")


def own_options(function: Function) -> Function:
    """Let a function answer for keyword arguments that are none of its own.

    See `check_options`.
    """
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    called = function.__qualname__.removesuffix(".__init__").split(".")[-1]  # the class, of one that makes objects

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            check_options(called, kwargs, known)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]
