"""The JSON schema of a job file, for editors and for the reference in the documentation."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from dp_ray.job import Job


class _KeysOnly(GenerateJsonSchema):
    """Pydantic's schema with descriptions of keys alone: an editor would show those of parts in their place."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would repeat the key

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        return {key: value for key, value in super().model_schema(schema).items() if key != "description"}


def json_schema() -> dict[str, Any]:
    """What a job file may hold: its keys with their values, defaults and meanings, as JSON Schema.

    It checks each key by itself. `dp-ray plan` also checks what must hold among several keys.
    """
    schema = Job.model_json_schema(schema_generator=_KeysOnly)
    about = {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": "A job of dp_ray",
        "description": "What to run: a model over a dataset.",
    }
    return {**about, **schema, **about, "properties": {**schema["properties"], **_args()}}


def _args() -> dict[str, Any]:
    """The keys that hold the args of a target: `model_args`, `dataset_args` and so on."""
    return {
        f"{key}_args": {"type": ["object", "null"], "description": f"The args of `{key}`, in a key of their own."}
        for key in Job.TARGETED
    }
