"""Wraps what a task sends into a message; apart from the messages, since it needs the type of shape reports."""

from typing import Any

from dp_ray.monitor.messages import Message, Shapes, TaskMessage
from dp_ray.results.shape_recorder import Report


def message_of(attempt: str, what: Any) -> Message:
    """Wrap what a task sends into a message that names its attempt."""
    return Shapes(attempt, what) if isinstance(what, Report) else TaskMessage(attempt, what)
