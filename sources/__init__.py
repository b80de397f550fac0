"""Where records come from: replayable sources whose positions live in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceflow.core.imports.lazy_names import lazy_names

if TYPE_CHECKING:
    from onceflow.sources.datagen import DatagenSource, GeneratedPayments
    from onceflow.sources.kafka import KafkaSource, ValueFormat
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "onceflow.sources.datagen": "DatagenSource GeneratedPayments",
            "onceflow.sources.kafka": "KafkaSource ValueFormat",
        },
    )

__all__ = ["DatagenSource", "GeneratedPayments", "KafkaSource", "ValueFormat"]
