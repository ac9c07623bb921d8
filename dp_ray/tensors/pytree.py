"""Take apart and rebuild objects of classes that are registered with torch's pytree.

torch 2.11 to 2.13 has no public interface to it, so this module, and no other, uses the private one.
"""

from typing import Any

from torch.utils import _pytree


def is_registered(cls: type[Any]) -> bool:
    """Whether a class is registered with torch's pytree."""
    return cls in _pytree.SUPPORTED_NODES


def take_apart(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """The keys and values of a node of a registered class, and the context that `make` needs to rebuild it."""
    registered = _pytree.SUPPORTED_NODES[type(node)]
    if registered.flatten_with_keys_fn is None:
        values, context = registered.flatten_fn(node)
        return tuple(range(len(values))), tuple(values), context
    pairs, context = registered.flatten_with_keys_fn(node)
    keys = [_key_of(key) for key, _ in pairs]
    is_unique = len(set(keys)) == len(keys)
    return tuple(keys) if is_unique else tuple(range(len(pairs))), tuple(value for _, value in pairs), context


def make(cls: type[Any], values: list[Any], context: Any) -> Any:
    """The inverse of `take_apart`."""
    return _pytree.SUPPORTED_NODES[cls].unflatten_fn(values, context)


def _key_of(key: Any) -> int | str:
    """The plain key, index or name inside one of torch's key objects."""
    for name in ("key", "idx", "name"):
        if isinstance(found := getattr(key, name, None), int | str):
            return found
    return str(key)
