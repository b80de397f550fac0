"""Writes all pictures to docs/images: `python -m docs.pictures`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.pictures import checkpoints, dataflow
from docs.pictures.drawing import Picture

IMAGES = Path(__file__).resolve().parents[1] / "images"
PICTURES: Mapping[str, Callable[[], Picture]] = {
    "overview": dataflow.draw_overview,
    "barriers": dataflow.draw_barriers,
    "key-groups": dataflow.draw_key_groups,
    "checkpoint": checkpoints.draw_checkpoint,
    "transaction": checkpoints.draw_transaction,
    "recovery": checkpoints.draw_recovery,
    "layers": checkpoints.draw_layers,
}


def main() -> None:
    """Draw each picture, and replace its file."""
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
