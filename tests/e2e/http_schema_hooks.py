"""Changes the requests that schemathesis generates: most of them name the served model, or they would all end there."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

MODEL = os.environ["SERVED_MODEL"]


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Returns the body of a request with the name of the served model."""
    if isinstance(body, dict) and (body.get("model") is None or isinstance(body["model"], str)):
        return {**body, "model": MODEL}
    return body
