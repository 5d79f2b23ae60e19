"""An answer as JSON text: what programs read. Never through rich, which would wrap it."""

from __future__ import annotations

import json
from typing import Any


def render_json(answer: dict[str, Any]) -> str:
    """Return an answer as JSON text, indented, keys in the schema's order, one newline at the end."""
    return json.dumps(answer, indent=2, ensure_ascii=False) + "\n"
