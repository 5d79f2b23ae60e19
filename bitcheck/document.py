"""Small JSON files that show any change to them: run.json, a rank's header, a rank's seal.

    {
      "checksum": "5b0d6d0e2a8f0f0c4d1b7f3f2f6f1c9e",
      "schema": "bitcheck.run/1",
      ...
    }

`checksum` is the XXH3-128 of the compact JSON of all the rest, keys sorted. The text itself must be
exactly what `encode_document` writes for its content: JSON has several spellings of one value
(`\\u00e9` and `\\u00E9` differ in one bit), and a changed bit that changes no value is still damage.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

MAX_BYTES = 16 * 1024 * 1024
"""No document is as large as this; what is was not written by bitcheck."""


class DocumentError(ValueError):
    """The text is not a document, or was changed; `str(error)` says how, for use inside a sentence."""


def encode_document(content: dict[str, Any], *, one_line: bool = False) -> bytes:
    """Return the text of `content` with its checksum (an old one is replaced), ASCII, newline at the end."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    document = {"checksum": _checksum(rest), **rest}
    text = json.dumps(document, indent=None if one_line else 2, sort_keys=True, allow_nan=False)
    return text.encode("ascii") + b"\n"


def decode_document(text: bytes) -> dict[str, Any]:
    """Return the content of `text`, without the checksum.

    Raises DocumentError where it is not JSON, not an object, or not as `encode_document` wrote it.
    """
    if not text:
        raise DocumentError("is empty")
    try:
        document = json.loads(text.decode("ascii"))
    except (ValueError, RecursionError):
        raise DocumentError("is not JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("schema"), str):
        raise DocumentError("has no schema")
    recorded = document.pop("checksum", None)
    try:
        is_intact = (
            recorded == _checksum(document) and encode_document(document, one_line=text.count(b"\n") == 1) == text
        )
    except (ValueError, RecursionError):
        is_intact = False
    if not is_intact:
        raise ChangedDocument("does not match its own checksum", document["schema"])
    return document


class ChangedDocument(DocumentError):
    """JSON with a schema whose checksum does not hold."""

    def __init__(self, message: str, schema: str) -> None:
        super().__init__(message)
        self.schema = schema


def _checksum(rest: dict[str, Any]) -> str:
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode("ascii"))
