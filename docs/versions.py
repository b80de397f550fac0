"""Lays out the published site: what leads from one version of it to another.

    python docs/versions.py SITE [URL]

Each version is a directory of SITE, which holds all pages of that version. `stable/` is a copy of
the newest one, and `versions.json` is what the theme's switcher reads. Publishing is copying: the
directories of earlier versions are put beside the new one, and this is run again. URL is the
address of SITE, with a slash at the end; without it, the root of whatever host serves SITE.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from packaging.version import Version

STABLE = "stable"


def lay_out(site: Path, url: str = "/") -> None:
    """Write `stable/`, versions.json and index.html for the versions below `site`, newest first.

    The stable version is the newest final one, and before the first final one the newest. What a
    crash leaves is written anew by the next call.
    """
    versions = sorted(
        (Version(index.parent.name) for index in site.glob("[0-9]*/index.html")), reverse=True
    )
    stable = next((one for one in versions if not one.is_prerelease), versions[0])
    shutil.rmtree(site / STABLE, ignore_errors=True)
    shutil.copytree(site / str(stable), site / STABLE)
    (site / "versions.json").write_text(
        json.dumps([_describe(one, url, is_stable=one == stable) for one in versions], indent=2),
        encoding="utf-8",
    )
    (site / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>onceflow</title>'
        f'<meta http-equiv="refresh" content="0; url={STABLE}/">'
        f'<a href="{STABLE}/">onceflow {stable}</a>\n',
        encoding="utf-8",
    )
    # GitHub's pages would leave out directories whose names begin with an underscore.
    (site / ".nojekyll").touch()


def _describe(version: Version, url: str, *, is_stable: bool) -> dict[str, object]:
    """Return a version's entry. Its address is absolute: a relative one is taken from each page."""
    if not is_stable:
        return {"version": str(version), "url": f"{url}{version}/"}
    # The theme shows a warning on the pages of all versions but the preferred one.
    return {
        "name": f"{version} ({STABLE})",
        "version": str(version),
        "url": f"{url}{STABLE}/",
        "preferred": True,
    }


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]), *sys.argv[2:])
