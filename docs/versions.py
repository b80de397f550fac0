"""Lists the versions of the site for its switcher, and leads its root to the newest one.

    python docs/versions.py build/docs

Each version is a directory, which holds the whole site of that version. Publishing is copying: the
directories of earlier versions are put beside the new one, and this is run again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from packaging.version import Version


def write_version_list(site: Path) -> None:
    """Write versions.json and index.html into `site` for the versions below it, newest first."""
    versions = sorted(
        (Version(index.parent.name) for index in site.glob("[0-9]*/index.html")), reverse=True
    )
    entries = [
        {"name": str(version), "version": str(version), "url": f"../{version}/"}
        for version in versions
    ]
    (site / "versions.json").write_text(json.dumps(entries, indent=2), encoding="utf-8")
    newest = versions[0]
    (site / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>onceflow</title>'
        f'<meta http-equiv="refresh" content="0; url={newest}/">'
        f'<a href="{newest}/">onceflow {newest}</a>\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    write_version_list(Path(sys.argv[1]))
