"""The command `onceflow checkpoints`, for a job's checkpoints and savepoints in storage.

A NAME is the number of a checkpoint in the job's decision log, or the directory of a savepoint. No
subcommand needs a running driver. Exit status: 0 done, 1 refused or damaged, 2 usage, 3 the storage
cannot be reached.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias

import typer

from onceflow.cli.jobs.client import DriverLocation
from onceflow.cli.jobs.command import Json, Storage
from onceflow.cli.terminal import console, print_listing, say
from onceflow.core.errors import ConfigError, OnceflowError, SavepointRefused, StorageError
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.storage import CheckpointStorage, JobStorage, stored_checkpoints
from onceflow.core.storage.snapshots.savepoints import damages

EXIT_REFUSED, EXIT_USAGE, EXIT_UNREACHABLE = 1, 2, 3

checkpoints = typer.Typer(
    no_args_is_help=True,
    help=(
        "List, show and verify a job's checkpoints and savepoints in storage, and delete"
        " savepoints. Exit status: 0 done, 1 refused or damaged, 2 usage, 3 the storage cannot"
        " be reached."
    ),
)

Job: TypeAlias = Annotated[
    str | None, typer.Option("--job", help="Name of the job. Needed if the storage holds several.")
]
Name: TypeAlias = Annotated[
    str, typer.Argument(help="Number of a checkpoint, or directory of a savepoint.")
]


@checkpoints.command("list")
def list_(
    storage: Storage,
    job: Annotated[
        str | None, typer.Argument(help="Name of the job. Needed if the storage holds several.")
    ] = None,
    json_: Json = False,
) -> None:
    """List the checkpoints that the decision log holds, and the savepoints in the job's storage."""
    with _exit_status():
        opened = stored_checkpoints.open_job(_open_storage(storage), job)
        rows = [checkpoint.describe() for checkpoint in _list_stored(storage, opened)]
        if json_:
            print(json.dumps({"job": opened.job, "checkpoints": rows}))
            return
        headings = ("NAME", "KIND", "ATTEMPT", "COMPLETED", "BYTES", "FILES", "TRANSACTIONS")
        print_listing(
            console(),
            headings,
            [[(str(row[heading.lower()]), "") for heading in headings] for row in rows],
        )


@checkpoints.command()
def show(name: Name, storage: Storage, job: Job = None, json_: Json = False) -> None:
    """Show what one checkpoint or savepoint holds, by operator."""
    with _exit_status():
        checkpoint = _find_stored(storage, job, name)
        facts = checkpoint.describe() | {"operators": _describe_operators(checkpoint.completed)}
        if json_:
            print(json.dumps(facts))
            return
        for key, value in facts.items():
            if key != "operators":
                print(f"{key}: {value}")
        headings = ("UID", "SUBTASKS", "BYTES", "LISTS", "TRANSACTIONS")
        print_listing(
            console(),
            headings,
            [
                [(str(row[heading.lower()]), "") for heading in headings]
                for row in facts["operators"]
            ],
        )


@checkpoints.command()
def verify(
    storage: Storage,
    name: Annotated[
        str | None,
        typer.Argument(help="Number of a checkpoint, or directory of a savepoint. Default: all."),
    ] = None,
    job: Job = None,
    json_: Json = False,
) -> None:
    """Read every state file and compare its checksum; exit status 1 when one is not whole."""
    with _exit_status():
        opened = None if name else stored_checkpoints.open_job(_open_storage(storage), job)
        chosen = (
            _list_stored(storage, opened) if opened else [_find_stored(storage, job, name or "")]
        )
        wrong = [
            {"name": checkpoint.name, "damage": text}
            for checkpoint in chosen
            for text in damages(checkpoint.completed, checkpoint.reader)
        ]
        if json_:
            print(
                json.dumps(
                    {"verified": [checkpoint.name for checkpoint in chosen], "damaged": wrong}
                )
            )
        else:
            for damage in wrong:
                say(f"{damage['name']}: {damage['damage']}", style="red")
            files = sum(checkpoint.describe()["files"] for checkpoint in chosen)
            print(
                f"verified {len(chosen)} checkpoints and savepoints with {files} files:"
                f" {len(wrong)} files are damaged"
            )
        if wrong:
            raise typer.Exit(EXIT_REFUSED)


@checkpoints.command()
def dispose(
    name: Name,
    storage: Storage,
    job: Job = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a savepoint. A checkpoint belongs to its job, which deletes it by itself."""
    with _exit_status():
        checkpoint = _find_stored(storage, job, name)
        if checkpoint.savepoint is None:
            raise SavepointRefused(
                f"checkpoint {name} belongs to its job, which deletes it once"
                " Checkpointing(retained=…) newer ones exist: only savepoints can be deleted"
                " with this command"
            )
        if not yes and not typer.confirm(f"Delete savepoint {checkpoint.savepoint}?"):
            raise typer.Exit(EXIT_REFUSED)
        checkpoint.savepoint.dispose()
        print(f"deleted {checkpoint.savepoint}")


# --- steps ---------------------------------------------------------------------------------------


@contextmanager
def _exit_status() -> Generator[None, None, None]:
    try:
        yield
    except OnceflowError as error:
        say(f"onceflow checkpoints: {error}", style="red")
        match error:
            case StorageError():
                raise typer.Exit(EXIT_UNREACHABLE) from error
            case ConfigError() if not isinstance(error, SavepointRefused):
                raise typer.Exit(EXIT_USAGE) from error
            case _:
                raise typer.Exit(EXIT_REFUSED) from error


def _open_storage(storage: str) -> CheckpointStorage:
    return DriverLocation(storage, "_", 0.0).described


def _list_stored(storage: str, job: JobStorage) -> list[stored_checkpoints.StoredCheckpoint]:
    checkpoints = stored_checkpoints.checkpoints_of(job)
    for savepoint in stored_checkpoints.savepoints_of(_open_storage(storage), job):
        if isinstance(savepoint, stored_checkpoints.StoredCheckpoint):
            checkpoints.append(savepoint)
        else:
            say(str(savepoint), style="yellow")
    return checkpoints


def _find_stored(storage: str, job: str | None, name: str) -> stored_checkpoints.StoredCheckpoint:
    if not name.isdigit():
        return stored_checkpoints.savepoint_at(_open_storage(storage), name)
    return stored_checkpoints.checkpoint_at(
        stored_checkpoints.open_job(_open_storage(storage), job), int(name)
    )


def _describe_operators(completed: CompletedCheckpoint) -> list[dict[str, Any]]:
    uids = sorted({o.uid for s in completed.snapshots for o in s.operators})
    rows: list[dict[str, Any]] = []
    for uid in uids:
        parts = [operator for _, operator in completed.operator(uid)]
        rows.append(
            {
                "uid": uid,
                "subtasks": len(parts),
                "bytes": sum(map(stored_checkpoints.size_bytes, parts)),
                "lists": sum(len(e) for part in parts for e in part.lists.values()),
                "transactions": sum(len(part.committables) for part in parts),
            }
        )
    return rows
