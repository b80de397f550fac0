"""`python -m script.images`: the images that tests in containers need.

Speaks to the daemon that testcontainers uses. Exits with 3, and a reason, where something cannot be
had.
"""

from __future__ import annotations

import argparse
import sys

from script.images.build import build_debian, build_images
from script.images.official import official_images, remove_containers
from script.images.recipes import PROMETHEUS, RECIPES

from onceflow.integration.servers.server import ServerError


def main() -> int:
    """Run one command and return its status."""
    parser = argparse.ArgumentParser(prog="script.images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("official", help="have the official images, pulled where they are missing")
    build = commands.add_parser("build", help="build local images where they are missing")
    build.add_argument("--prefix", default="local/", help="what stands before the official names")
    build.add_argument(
        "--deployment", action="store_true", help="those that deploy/docker needs besides, too"
    )
    commands.add_parser("remove", help="remove every container, with its volumes")
    arguments = parser.parse_args()
    try:
        match arguments.command:
            case "official":
                official_images(_say)
            case "build":
                beside = [PROMETHEUS] if arguments.deployment else []
                build_images(arguments.prefix, _say, [*RECIPES, *beside])
                if arguments.deployment:
                    build_debian(arguments.prefix, _say)
            case _:
                remove_containers()
    except ServerError as error:
        _say(str(error))
        return 3
    return 0


def _say(line: str) -> None:
    print(f"images: {line}", file=sys.stderr, flush=True)  # noqa: T201 - this is a command


if __name__ == "__main__":
    sys.exit(main())
