"""A target: what a job names to be called, as `module:attribute` with args."""

import functools
import inspect
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema, model_validator

from dp_ray.job_args import Told, told_args

TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class Strict(BaseModel):
    """A frozen model in which unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


class Target(Strict):
    """What to call, with `args` as keywords: `module:attribute`, or from Python a class or function itself."""

    EXAMPLE: ClassVar[str] = "jobs.digits:Net"

    target: Annotated[Any, WithJsonSchema({"type": "string", "pattern": f"^{TARGET.pattern}$"})] = Field(
        description="`module:attribute`, imported from the current folder. From Python, a class or function too."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keywords with which the target is called.")
    _told: Told = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _opened(cls, values: Any) -> Any:
        """A partial becomes its function or class, and its keywords become args."""
        given = values.get("target") if isinstance(values, dict) else None
        if not isinstance(given, functools.partial) or (keywords := _keywords(given)) is None:
            return values
        return {**values, "target": given.func, "args": {**keywords, **values.get("args", {})}}

    @model_validator(mode="after")
    def _is_a_target(self) -> "Target":
        if not (TARGET.fullmatch(self.target) if isinstance(self.target, str) else _is_called(self.target)):
            or_object = "" if isinstance(self.target, str) else ", or a class or function"
            raise ValueError(f"must be 'module:attribute', like {self.EXAMPLE!r}{or_object}, got {self.target!r:.80}")
        return self

    @model_validator(mode="after")
    def _tells_args(self) -> "Target":
        """Tell them as they are given: what is called with them may change them in place."""
        try:
            self._told = told_args({key: value for key, value in self if key != "target"})
        except RecursionError:
            raise ValueError("args: must be plain YAML values, got some that are nested too deeply") from None
        return self

    @property
    def untold(self) -> tuple[str, ...]:
        """The paths of Python objects in the args of which a file cannot tell whether they are the same."""
        return self._told.unknown

    @property
    def is_named(self) -> bool:
        """Whether it is a name, not a class or function from Python."""
        return isinstance(self.target, str)

    @property
    def label(self) -> str:
        """Its name, for messages."""
        return self.target if isinstance(self.target, str) else _qualified(self.target)


def _is_called(value: Any) -> bool:
    """Whether a Python object is called with args; other objects are used as they are."""
    return inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, functools.partial)


def _keywords(given: functools.partial[Any]) -> dict[str, Any] | None:
    """The arguments of a partial as keywords; None if they cannot be: a function gets other arguments first."""
    if not given.args or not inspect.isclass(given.func):
        return None if given.args else given.keywords
    try:
        takes = inspect.signature(given.func)
        found = takes.bind_partial(*given.args, **given.keywords).arguments
    except (TypeError, ValueError):
        return None
    by_name = all(takes.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for name in found)
    return dict(found) if by_name else None


def _qualified(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def target_parser(cls: type[Target]) -> BeforeValidator:
    """The validator of a key that holds a target of this class, or an object from Python."""

    def parse(value: Any) -> Any:
        """Make text, a mapping, a class or a function a target; leave other objects as they are."""
        if isinstance(value, str) or _is_called(value):
            return cls(target=value)
        if isinstance(value, Mapping):
            return cls.model_validate(dict(value))
        if value is None or isinstance(value, int | float):
            raise ValueError(f"must be a target, like {{target: 'jobs.digits:Net', args: {{}}}}, got {value!r}")
        return value

    return BeforeValidator(parse, json_schema_input_type=Annotated[str, Field(pattern=f"^{TARGET.pattern}$")] | cls)


Targeted = Annotated[Any, target_parser(Target)]


def describe_target(value: Any, as_objects: bool = False) -> Any:
    """A target as plain JSON values; an object from Python is shown as its type.

    `as_objects` leaves the args as they are, which earlier versions kept by their text.
    """
    if value is None:
        return None
    if not isinstance(value, Target):
        return f"<{_qualified(value)}>"
    rest = value.model_dump(exclude={"target"}) if as_objects else value._told.values
    return {"target": value.label if value.is_named else f"<{value.label}>", **rest}


def with_args(given: Any, args: Any) -> Any:
    """A target with these args, which a key such as `model_args` holds."""
    if isinstance(given, Target):
        return {**dict(given), "args": args}
    return {**given, "args": args} if isinstance(given, Mapping) else {"target": given, "args": args}
