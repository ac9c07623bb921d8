"""The tensors of modules that their calls may write, by name: where they are, and copies of them.

`Writable` has a state's: all buffers, and the parameters that it follows. `modules_beside` finds the modules that a
step calls beside the model.
"""

import functools
import inspect
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dp_ray.engine.alignment import is_aligned
from dp_ray.errors import ModelError
from dp_ray.tensors.changed import ADDRESS
from dp_ray.tensors.files import is_sharded, overlaps
from dp_ray.tensors.flat import Form, room, views

if TYPE_CHECKING:
    from dp_ray.job.job import Job

# Of these dtypes, one kernel on a GPU copies many tensors.
TOGETHER = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}
LARGEST_COPY = 1 << 31  # bytes of the modules beside a model of which a copy is made

Roots = Mapping[str, nn.Module]  # modules by the beginning of their tensors' names; the model's is empty
OUTSIDE = "."  # the first letter of a name beside the model: none in a model begins with it
Values = dict[str, torch.Tensor | None]
Forms = dict[str, Form | None]
Place = tuple[Any, str]  # a module's buffers, and a key of them
Groups = list[tuple[list[torch.Tensor], list[torch.Tensor]]]  # tensors, and those that are copied into them
NONE: Roots = {}
LOOK = operator.attrgetter("shape", "dtype", "requires_grad")


class Copies:
    """Values of a state's tensors, in one piece of memory, `flat`; and the tensors that get them again.

    While it `fits`, `take` copies the tensors to the values, and `put` the values to the tensors, all at once: Python
    looks at no single tensor.
    """

    def __init__(self, of: "Writable", tensors: Values, forms: Forms) -> None:
        self.tensors, self.forms = tensors, forms
        present = {name: form for name, form in forms.items() if form is not None}
        device = of.device if present else "cpu"
        self.flat = torch.empty(sum(map(room, present.values())), dtype=torch.uint8, device=device)
        places = views(self.flat, present.values())
        self.values: Values = {**dict.fromkeys(forms), **dict(zip(present, places, strict=True))}
        self._of, self._places, self._followed = of, of.places, of.followed
        self._holders, self._keys = [held for held, _ in of.places.values()], [key for _, key in of.places.values()]
        self._standing = [tensors.get(name) for name in of.places]
        self._live = list(present_in(tensors).values())
        self._looks = self._look()
        self._can_fit = (
            tensors.keys() >= of.places.keys() | of.followed.keys()
            and forms_of(tensors) == forms
            and all(of.takes_values(tensor) and not tensor.is_inference() for tensor in self._live)
        )
        values = present_in(self.values)
        groups = grouped([(tensor, values[name]) for name, tensor in present_in(tensors).items() if name in values])
        copy = torch.no_grad()(copy_groups) if any(tensor.requires_grad for tensor in self._live) else copy_groups
        self.put = functools.partial(copy, groups)
        self.take = functools.partial(copy, [(into, live) for live, into in groups])

    def _look(self) -> list[Any]:
        return [*map(LOOK, self._live), *(map(ADDRESS, self._live) if self._of.aligns else ())]

    def fits(self) -> bool:
        """Return whether these very tensors are the state's now, in the same form as the values."""
        if not self._can_fit or self._of.places is not self._places or self._of.followed is not self._followed:
            return False
        try:
            standing = [*map(operator.getitem, self._holders, self._keys)]
        except KeyError:  # a forward has removed it
            return False
        return all(map(operator.is_, standing, self._standing)) and self._look() == self._looks


class Writable:
    """All buffers of modules, and the parameters that are `followed`, by name: read, copied and set again.

    With `aligns`, a buffer begins at a multiple of 16 bytes, also where a forward has set a view in its place.
    """

    def __init__(self, roots: Roots, aligns: bool) -> None:
        self.roots, self.aligns = roots, aligns
        self.places = places_of(roots)
        self.followed: dict[str, nn.Parameter] = {}
        tensors = chain((tensor for _, tensor in named_parameters_of(roots)), present_in(self.buffers()).values())
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))

    def buffers(self) -> Values:
        """Return the buffers that there are; None for one that a forward has removed."""
        return {name: tensor_at(*place) for name, place in self.places.items()}

    def takes_values(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor can be written in place, unlike an expanded one, and begins where it is to."""
        return not overlaps(tensor) and (is_aligned(tensor) or not self.aligns)

    def now(self) -> Values:
        """Return the tensors that there are."""
        return {**self.buffers(), **self.followed}

    def take(self, last: Copies | None) -> Copies:
        """Copy all values as they are now, into the memory of the last ones if these fit."""
        if last is None or not last.fits():
            now = self.now()
            last = Copies(self, now, forms_of(now))
        last.take()
        return last

    def put(self, copies: Copies) -> None:
        """Set all to the values of copies."""
        if copies.fits():
            copies.put()
        else:
            self._put_anew(copies)

    def _put_anew(self, copies: Copies) -> None:
        """Do so where a forward may have set a tensor anew, or has given it another form.

        What it has set anew gets its tensor of before; without one, that of now. A buffer of another size is made
        anew.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, (held, key) in self.places.items():
            if name not in copies.values:
                continue
            now, value = tensor_at(held, key), copies.values[name]
            into = copies.tensors.get(name, now)
            if value is None:
                into = None
            elif into is not None and self.takes_values(into) and form_or_none(into) == form_or_none(value):
                pairs.append((into, value))
            else:
                into = value.to((value if into is None else into).device, copy=True)
            if into is not now or into is None:
                held[key] = into
        for name, parameter in self.followed.items():
            if (value := copies.values.get(name)) is not None:
                if form_or_none(value) != form_or_none(parameter):
                    raise ModelError(f"the forward gave the parameter {name} another size or dtype")
                pairs.append((parameter, value))
        copy_all([into for into, _ in pairs], [value for _, value in pairs])


@contextmanager
def on_copies(modules: Roots) -> Iterator[None]:
    """Run the block with copies in the place of the tensors of modules beside a model, if these are not too large.

    A graph that waits for its backward may need the tensors as they are: to write their old values would be a write.
    """
    held = [(*place, tensor_at(*place)) for place in places_of(modules).values()]
    if sum(parameter.nbytes for _, parameter in named_parameters_of(modules)) <= LARGEST_COPY:
        for _, module in modules_of(modules):
            parameters = module._parameters
            held += [
                (parameters, key, one) for key, one in parameters.items() if one is not None and can_be_copied(one)
            ]
    copies = {id(tensor): tensor.detach().clone() for _, _, tensor in held if tensor is not None}
    try:
        for within, key, tensor in held:
            if tensor is not None:
                fresh = copies[id(tensor)]
                within[key] = nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
        yield
    finally:
        for within, key, tensor in held:
            within[key] = tensor


def shown(name: str) -> str:
    """Return the name of a tensor, or of a module beside the model, for errors."""
    return name.removeprefix(OUTSIDE)


def modules_of(roots: Roots) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in others, each once, by their names."""
    seen: set[nn.Module] = set()
    for name, root in roots.items():
        yield from root.named_modules(seen, name)


def named_parameters_of(roots: Roots) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of modules, each once, by their names."""
    seen: set[int] = set()
    for prefix, root in roots.items():
        for name, parameter in root.named_parameters(prefix):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def places_of(roots: Roots) -> dict[str, Place]:
    """Return the place of each dense buffer, by its name; a buffer that is None too."""
    return {
        joined(prefix, key): (module._buffers, key)
        for prefix, module in modules_of(roots)
        for key, buffer in module._buffers.items()
        if buffer is None or (buffer.layout is torch.strided and not buffer.is_quantized)
    }


def shared_in(tensors: Values) -> dict[str, str]:
    """Return which tensors share memory with one before them, and with which."""
    firsts: dict[int, str] = {}
    found = {
        name: firsts.setdefault(tensor.untyped_storage()._cdata, name) for name, tensor in present_in(tensors).items()
    }
    return {name: first for name, first in found.items() if first != name}


def tensor_at(held: Any, key: str) -> torch.Tensor | None:
    """Return the tensor in a place; None if there is none."""
    buffer: torch.Tensor | None = held[key] if key in held else None  # noqa: SIM401  TorchScript's has no `get`
    return buffer


def non_persistent(roots: Roots) -> set[str]:
    """Return the names of the buffers that no state_dict has."""
    return {
        joined(prefix, key)
        for prefix, module in modules_of(roots)
        for key in getattr(module, "_non_persistent_buffers_set", ())
    }


def can_be_copied(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be copied and sent as it is."""
    return not (
        is_lazy(parameter)
        or parameter.is_meta
        or is_sharded(parameter)
        or parameter.layout is not torch.strided
        or parameter.is_quantized
        or overlaps(parameter)
    )


def form_or_none(tensor: torch.Tensor | None) -> Form | None:
    """Return a tensor's size and dtype; None of none."""
    return None if tensor is None else Form(tensor.shape, tensor.dtype)


def forms_of(tensors: Mapping[str, torch.Tensor | None]) -> Forms:
    return {name: form_or_none(tensor) for name, tensor in tensors.items()}


def present_in(values: Values) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in values.items() if tensor is not None}


@torch.no_grad()
def copy_all(into: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """Copy the values into the tensors, many at once: on a GPU each single copy is a kernel."""
    copy_groups(grouped(list(zip(into, values, strict=True))))


def grouped(pairs: Collection[tuple[torch.Tensor, torch.Tensor]]) -> Groups:
    """Return the tensors of each device and dtype, and the values to copy into them."""
    kinds: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for into, value in pairs:
        tensors, values = kinds.setdefault((into.device, into.dtype), ([], []))
        tensors.append(into)
        values.append(value)
    return list(kinds.values())


def copy_groups(groups: Groups) -> None:
    for into, values in groups:
        if into[0].dtype in TOGETHER:
            torch._foreach_copy_(into, values)
        else:
            for tensor, value in zip(into, values, strict=True):
                tensor.copy_(value)


def modules_beside(job: "Job", step: Any, functions: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the modules that a step of the job reaches, and its metrics, and a loss over the batch."""
    found = modules_in("loss" if job.step is None else "step", step)
    for name, function in functions.items():
        found |= modules_in(name if name == "loss" else f"metrics.{name}", function)
    return found


def modules_in(key: str, function: Any) -> dict[str, nn.Module]:
    """Return the modules that a function of the job's `key` reaches.

    These are the function itself, or its method's object; values that `functools.partial` binds or a closure holds,
    in lists and dicts too; and attributes of an object that is called, or whose method is. A global variable cannot
    be told from one that the function does not use for this.
    """
    found: dict[str, nn.Module] = {}
    for name, module in _reached(OUTSIDE + key, function, set()):
        while name in found:
            name += "'"
        found[name] = module
    return found


def _reached(name: str, value: Any, seen: set[int], is_called: bool = True) -> Iterator[tuple[str, nn.Module]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: dict[str, Any] = {}
    if isinstance(value, nn.Module):
        if type(value).__module__ != "torch.nn.modules.loss":  # these write nothing
            yield name, value
    elif isinstance(value, functools.partial):
        yield from _reached(name, value.func, seen)
        inner = {**{str(at): argument for at, argument in enumerate(value.args)}, **value.keywords}
    elif inspect.ismethod(value):
        yield from _reached(name, value.__self__, seen)
    elif isinstance(value, Mapping | list | tuple):
        inner = _modules(value if isinstance(value, Mapping) else dict(enumerate(value)))
    elif inspect.isfunction(value):
        yield from _reached(name, getattr(value, "__wrapped__", None), seen)
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                inner[variable] = cell.cell_contents
    elif is_called:
        inner = _modules(getattr(value, "__dict__", {}))
    for key, member in inner.items():
        yield from _reached(f"{name}.{key}", member, seen, is_called=False)


def _modules(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): module for key, module in values.items() if isinstance(module, nn.Module)}
