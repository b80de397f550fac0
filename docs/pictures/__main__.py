"""Writes all pictures to docs/images, and the tables of results: `python -m docs.pictures`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.pictures import changes, charts, checkpoints, dataflow, floors, nexmark, results
from docs.pictures.drawing import Picture

IMAGES = Path(__file__).resolve().parents[1] / "images"
PICTURES: Mapping[str, Callable[[], Picture]] = {
    "overview": dataflow.draw_overview,
    "floors": floors.draw_floors,
    "barriers": dataflow.draw_barriers,
    "key-groups": dataflow.draw_key_groups,
    "checkpoint": checkpoints.draw_checkpoint,
    "transaction": checkpoints.draw_transaction,
    "recovery": checkpoints.draw_recovery,
    "layers": checkpoints.draw_layers,
    "postgres-copy": changes.draw_copy,
    "postgres-hand-over": changes.draw_hand_over,
    "postgres-acknowledgement": changes.draw_acknowledgement,
    "results-databases": charts.draw_databases,
    "results-state": charts.draw_state,
    "results-spark": charts.draw_spark,
    "results-loads": charts.draw_loads,
    "results-nexmark": nexmark.draw_results,
}


def main() -> None:
    """Draw each picture and replace its file, and fill the tables of results."""
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
    page = results.PAGE.read_text(encoding="utf-8")
    results.PAGE.write_text(results.fill_tables(page), encoding="utf-8")
    page = nexmark.PAGE.read_text(encoding="utf-8")
    nexmark.PAGE.write_text(nexmark.fill_page(page), encoding="utf-8")


if __name__ == "__main__":
    main()
