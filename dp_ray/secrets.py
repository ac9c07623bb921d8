"""Remove the secrets in URLs, like s3://KEY:SECRET@bucket/folder, from everything that is shown or kept."""

import re
from collections.abc import Mapping
from typing import Any

_NO_PORT = r"""[^/\s'"@:\[]*:(?!\d{1,5}(?:\D|$))"""
USER = re.compile(
    r"""(?<=://)(?:"""
    r"""[^/\s'"]*@|"""  # KEY:SECRET@
    rf"""{_NO_PORT}[^\s'"]*@|"""  # a secret with a slash, which URL parsers reject
    rf"""{_NO_PORT}[^\s'"]*)"""  # a secret truncated before its @
)
OPTION = re.compile(
    r"""([?&]\w*(?:secret|password|token|signature|credential|access_key|account_key|sas)\w*=)[^&\s'"]*""", re.I
)


def hide(text: str) -> str:
    """The text without the user, the password and the secret options of the URLs in it.

    >>> hide("s3://key:secret@bucket/runs?region=us-east-1 cannot be read")
    's3://bucket/runs?region=us-east-1 cannot be read'
    """
    return OPTION.sub(r"\1(hidden)", USER.sub("", text)) if "://" in text else text


def hide_in(value: Any) -> Any:
    """Plain JSON values with `hide` applied to each text; keys of mappings stay the same."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {key: hide_in(inner) for key, inner in value.items()}
    return [hide_in(inner) for inner in value] if isinstance(value, list | tuple) else value
