"""The command `onceflow config`, which prints the settings outside the program.

Exit status: 0 printed, 2 a setting is wrong. The error names the setting, its origin and the
accepted values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from onceflow.cli.terminal import console, print_listing, say
from onceflow.core.errors import ConfigError
from onceflow.core.settings.configuration import FILE_VARIABLE, Configuration, Setting, variable_of
from onceflow.core.settings.known_settings import NONE

EXIT_USAGE = 2


def config(
    file: Annotated[
        Path | None,
        typer.Option(
            help="Configuration file: TOML, or Flink's own YAML.",
            envvar=FILE_VARIABLE,
            show_envvar=True,
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Print every setting with its origin, its default and Flink's name for it."""
    try:
        loaded = Configuration.load(file)
        # Check the rules between settings. The storage need not be set.
        loaded.check()
    except ConfigError as error:
        if json_:
            print(json.dumps({"error": str(error), "exit_status": EXIT_USAGE}))
        else:
            say(f"onceflow: {error}", style="red")
        raise typer.Exit(EXIT_USAGE) from error
    if json_:
        settings = [_as_json(setting) for setting in loaded.settings()]
        print(json.dumps({"settings": settings, "hints": list(loaded.hints())}))
        return
    headings = ("SETTING", "VALUE", "ORIGIN", "DEFAULT", "IN FLINK")
    print_listing(console(), headings, [_row(setting) for setting in loaded.settings()])


def _row(setting: Setting) -> list[tuple[str, str]]:
    option, style = setting.option, "bold" if setting.is_set else ""
    cells = (
        option.name,
        option.to_text(setting.value),
        setting.origin,
        option.to_text(option.default),
        option.flink[0] if option.flink else "-",
    )
    return [(cell, style) for cell in cells]


def _as_json(setting: Setting) -> dict[str, object]:
    option = setting.option
    return {
        "name": option.name,
        "value": None if (text := option.to_text(setting.value)) == NONE else text,
        "origin": setting.origin,
        "default": option.to_text(option.default),
        "flink": list(option.flink),
        "environment": variable_of(option.name),
    }
