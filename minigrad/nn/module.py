"""Module: something with parameters that can be called."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar

import numpy as np

from minigrad import habits
from minigrad.autodiff.mode import current_hook
from minigrad.backend import Array
from minigrad.nn.buffer import Buffer
from minigrad.parameter import Parameter
from minigrad.tensor import Tensor

Named = TypeVar("Named", bound=Parameter | Buffer)


class Module:
    """Base of all layers and models. `__init__` sets attributes, `__call__` uses ops.

    What belongs to a module are the modules, parameters and buffers among its attributes, also inside lists, tuples
    and dicts.

    Attributes:
        training: whether random layers are on; set by `train` and `eval`.
    """

    training = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Say what a layer takes, where it is made as in PyTorch: `Linear(4, 16)`, `Conv2d(..., kernel_size=3)`."""
        if (args and isinstance(args[0], (int, float))) or kwargs.keys() & habits.OPTIONS.keys():
            _check_arguments(cls, args, kwargs)
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        """Let op hooks (`profile`, `detect_anomaly`) know which module is being called."""
        super().__init_subclass__()
        if "__call__" in vars(cls):
            cls.__call__ = _hooked(cls.__call__)  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Assigning to a buffer copies values in; a parameter gives way to another one only.

        So whoever asked this module for its buffers and parameters, a checkpoint or an optimizer, still has them all.

        Raises:
            ValueError: the value has another shape than the buffer.
            TypeError: the value is no array of numbers, or is assigned to a parameter.
        """
        before = vars(self).get(name)
        if value is before or not isinstance(before, (Buffer, Parameter)):
            super().__setattr__(name, value)
        elif isinstance(before, Buffer):
            if isinstance(value, Buffer) and value.name != before.name:
                raise ValueError(f"the buffer {before.label} cannot become {value.label}: del the attribute first")
            before.data = value.data if isinstance(value, Tensor) else value
        elif value is None or isinstance(value, (Parameter, Module)):
            super().__setattr__(name, value)
        else:
            raise TypeError(
                f"{before.label} is a parameter: assign another Parameter, or give it values with .{name}.data = ..."
            )

    def __dir__(self) -> list[str]:
        return habits.own_names(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        advice = ": give its `forward` that name" if hasattr(self, "forward") else ""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__{advice}")

    # -- what is inside, always in the order of declaration -----------------------------------

    def modules(self) -> Iterator[Module]:
        """Yield this module and all modules in it."""
        return (module for _, module in self.named_modules())

    def named_modules(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (path, module) for this module and all modules in it.

        They look like `("GPT.layers[1].attention.norm", ...)`.

        Args:
            path: of this module; the name of its class by default.
        """
        path = path or type(self).__name__
        yield path, self
        for name, member in self.members():
            if isinstance(member, Module):
                yield from member.named_modules(f"{path}.{name}")

    def members(self) -> Iterator[tuple[str, Module | Parameter | Buffer]]:
        """Yield (name, member) for the members among this module's attributes.

        Members of members are not among them.
        """
        for name, value in vars(self).items():
            yield from _members_in(name, value)

    def parameters(self) -> list[Parameter]:
        """Return all parameters, tied ones once."""
        return [tensor for tensor in self._tensors() if isinstance(tensor, Parameter)]

    def buffers(self) -> list[Buffer]:
        """Return all buffers, shared ones once."""
        return [tensor for tensor in self._tensors() if isinstance(tensor, Buffer)]

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (name, parameter) for all parameters, tied ones once.

        A `dict` of it finds one by name.

        Raises:
            ValueError: a parameter has no name, or two have the same.
        """
        return iter(_by_name(self.parameters()).items())

    def _tensors(self) -> list[Parameter | Buffer]:
        return list(dict.fromkeys(self._walk()))

    def _walk(self) -> Iterator[Parameter | Buffer]:
        for _, member in self.members():
            if isinstance(member, Module):
                yield from member._walk()
            else:
                yield member

    # -- what is done with it -----------------------------------------------------------------

    def train(self, training: bool = True) -> Self:
        """Turn random layers on, in this module and all in it, and return it."""
        for module in self.modules():
            module.training = training
        return self

    def eval(self) -> Self:
        """Turn random layers off, in this module and all in it, and return it."""
        return self.train(False)

    def state_dict(self) -> dict[str, Array]:
        """Return a copy of the values of all parameters and buffers by name.

        Raises:
            ValueError: one has no name, or two have the same.
        """
        return {name: tensor.data.copy() for name, tensor in _by_name(self._tensors()).items()}

    @habits.own_options
    def load_state_dict(self, values: Mapping[str, Array]) -> None:
        """Copy values into the parameters and buffers, all or nothing.

        Raises:
            ValueError: names are missing or unexpected, or a shape differs: lists all that is wrong.
            TypeError: a dtype does not fit.
        """
        tensors = _by_name(self._tensors())
        wrong = [
            f"{name}: expected {tensors[name].shape}, got {np.shape(values[name])}"
            for name in sorted(tensors.keys() & values.keys())
            if tensors[name].shape != np.shape(values[name])
        ]
        missing, unexpected = sorted(tensors.keys() - values.keys()), sorted(values.keys() - tensors.keys())
        if wrong or missing or unexpected:
            raise ValueError(f"load_state_dict: missing {missing}, unexpected {unexpected}, wrong shape {wrong}")
        arrays = {name: tensor.fitting("data", values[name]) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            tensor.data = arrays[name]

    def __repr__(self) -> str:
        """Show what is in this module, indented: its numbers and shapes, then modules, equal neighbours as one."""
        own = [f"{name}={value!r}" for name, value in vars(self).items() if _is_setting(name, value)]
        own += [f"{name}{list(x.shape)}" for name, x in self.members() if not isinstance(x, Module)]
        inner = [
            f"({name}): {text}" for attribute, value in vars(self).items() for name, text in _tree(attribute, value)
        ]
        first, last = f"{type(self).__name__}({', '.join(own)}", ")"
        return "\n".join(
            [first, *(f"  {line}" for text in inner for line in text.splitlines()), last] if inner else [first + last]
        )

    def summary(self) -> str:
        """Return a table for a person.

        It has path and class of each module, how many parameters it has itself, and shapes.
        """
        rows = [("module", "class", "parameters", "shapes")]
        counted: set[Parameter | Buffer] = set()
        for path, module in self.named_modules():
            size, shapes = 0, []
            for name, member in module.members():
                if isinstance(member, Module):
                    continue
                if isinstance(member, Parameter) and member not in counted:
                    size += member.size
                kind = "buffer " * isinstance(member, Buffer)
                shapes.append(f"{kind}{name} {member.shape}{' (tied)' * (member in counted)}")
                counted.add(member)
            rows.append((path, type(module).__name__, f"{size:,}", ", ".join(shapes)))
        frozen = sum(p.size for p in self.parameters() if not p.requires_grad)
        total = sum(p.size for p in self.parameters())
        rows.append(("total", "", f"{total:,}", f"{frozen:,} of them frozen" * (frozen > 0)))
        wide, wider = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{row[0]:<{wide}}  {row[1]:<{wider}} {row[2]:>12}  {row[3]}".rstrip() for row in rows)


def _members_in(name: str, value: Any) -> Iterator[tuple[str, Module | Parameter | Buffer]]:
    if isinstance(value, (Module, Parameter, Buffer)):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _members_in(f"{name}[{i}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _members_in(f"{name}[{key!r}]", item)


def _is_setting(name: str, value: Any) -> bool:
    """Tell whether an attribute is a number, or a few of them, that says what a module does."""
    numbers = value if isinstance(value, tuple) and value else (value,)
    return name != "training" and name[0] != "_" and all(isinstance(x, (int, float)) for x in numbers)


def _tree(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the modules and functions in an attribute; items of a list that read alike are one line."""
    if isinstance(value, Module):
        yield name, repr(value)
    elif isinstance(value, (list, tuple)):
        start = 0
        for text, run in itertools.groupby(value, lambda item: list(_tree("", item))):
            stop = start + len(list(run))
            for path, inner in text:
                many = (f"[{start}:{stop}]", f"{stop - start} x {inner}") if stop - start > 1 else (f"[{start}]", inner)
                yield f"{name}{many[0]}{path}", many[1]
            start = stop
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tree(f"{name}[{key!r}]", item)
    elif callable(value) and not isinstance(value, Tensor):
        yield name, getattr(value, "__name__", type(value).__name__)


def _check_arguments(cls: type[Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a TypeError if a module is made as in PyTorch: with no getter or name in front, or with PyTorch's words."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    takes = [p.name for p in parameters]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        habits.check_options(cls.__name__, kwargs.keys() & habits.OPTIONS.keys(), takes)
    if args and isinstance(args[0], (int, float)) and takes and takes[0] in _FIRST:
        what, example, where = _FIRST[takes[0]]
        call = f"{cls.__name__}({example}, {', '.join(map(repr, args))})"
        raise TypeError(f"{cls.__name__} takes {what}: write {call}{where}")


# Name of a layer's first argument -> what it is, one of them, and where that comes from.
_FIRST = {
    "param": ("a getter of parameters first", "param.at('fc')", ", with param = nn.ParamGetter() or your model's"),
    "name": ("a name first, the key of its random numbers", "'drop'", ""),
}


def _by_name(tensors: Iterable[Named]) -> dict[str, Named]:
    named: dict[str, Named] = {}
    for tensor in tensors:
        if not tensor.name:
            raise ValueError(f"parameters are told apart by name, but one of shape {tensor.shape} has none")
        if tensor.name in named:
            raise ValueError(
                f"names must be unique, got {tensor.label} twice: shapes {named[tensor.name].shape} and {tensor.shape}"
            )
        named[tensor.name] = tensor
    return named


def _hooked(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def hooked(self: Module, *args: Any, **kwargs: Any) -> Any:
        hook = current_hook()
        if hook is None:
            return call(self, *args, **kwargs)
        with hook.module(self):
            return call(self, *args, **kwargs)

    return hooked


class SkipLayer(Module):
    """A layer with skip connections: see `minigrad.nn.skips`.

    Attributes:
        gives: names that its output has for later layers.
        takes: names of outputs of layers before that it is called with, after its own input.
    """

    def __init__(self, layer: Callable[..., Any], gives: tuple[str, ...], takes: tuple[str, ...]) -> None:
        self.layer = layer
        self.gives = gives
        self.takes = takes

    def __call__(self, x: Any, given: dict[str, Any]) -> Any:
        """Call the layer, and add its output to what is given."""
        missing = [name for name in self.takes if name not in given]
        if missing:
            raise ValueError(f"a layer takes {missing[0]!r}, which no layer before it gives")
        y = self.layer(x, *(given[name] for name in self.takes))
        given.update(dict.fromkeys(self.gives, y))
        return y


class Sequential(Module):
    """Call layers one after another: modules, ops, or functions of one tensor.

    Args:
        layers: in order, as one list.
    """

    def __init__(self, layers: Iterable[Callable[[Any], Any]], *more: Any) -> None:
        if more or isinstance(layers, Module):
            raise TypeError("Sequential takes its layers as one list: write Sequential([first, second])")
        self.layers = list(layers)

    def __call__(self, x: Any, given: dict[str, Any] | None = None) -> Any:
        """Call the layers.

        Args:
            given: what skip connections bring from layers elsewhere, by name; what these layers give is added.
        """
        given = {} if given is None else given
        for layer in self.layers:
            x = layer(x, given) if isinstance(layer, SkipLayer) else layer(x)
        return x

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Callable[[Any], Any]]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> Any:
        return self.layers[index]


habits.teach(Module, habits.MODULE)
