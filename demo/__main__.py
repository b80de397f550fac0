"""Runs the demo of this repository: `script/demo`, or `onceflow demo` of an editable install."""

from __future__ import annotations

from demo.command import app
from tests.support.servers.database_packages import offer_packages

if __name__ == "__main__":
    offer_packages()
    app(prog_name="onceflow demo")
