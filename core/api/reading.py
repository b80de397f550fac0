"""The streams of a source, and the checks of `Pipeline.read` and `Pipeline.read_outputs`."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from onceflow.core.api.stream import Stream
from onceflow.core.errors import ConfigError
from onceflow.core.plan.event_time import WatermarkStrategy
from onceflow.core.plan.graph import Feed, GraphBuilder
from onceflow.core.plan.work import ReadFrom
from onceflow.core.spi import Sink, Source
from onceflow.core.spi.dead_letters import DEAD_LETTERS_TAG


def read_stream(
    graph: GraphBuilder,
    source: Source,
    uid: str,
    dead_letters: Sink | None,
    watermarks: WatermarkStrategy | None,
) -> Stream:
    """Add a source with one stream to the graph, and return the stream.

    Raises:
        ConfigError: The source has several outputs, or an argument does not fit the source.
    """
    if source.outputs:
        raise ConfigError(
            f"read(uid={uid!r}): the source has an output stream for each of"
            f" {', '.join(source.outputs)}. Read it with read_outputs(source, uid={uid!r}),"
            " which returns all of them by name"
        )
    strategies: dict[str | None, WatermarkStrategy] = {}
    if watermarks is not None:
        watermarks.check(source.schema)
        strategies[None] = watermarks
    _add_source(graph, ReadFrom(source, strategies), uid, dead_letters, verb="read")
    return Stream(graph, Feed(uid, source.schema))


def read_streams(
    graph: GraphBuilder,
    source: Source,
    uid: str,
    dead_letters: Sink | None,
    watermarks: Mapping[str, WatermarkStrategy] | None,
) -> Mapping[str, Stream]:
    """Add a source with several outputs to the graph, and return their streams by name.

    Raises:
        ConfigError: The source has one stream, or an argument does not fit the source.
    """
    outputs = dict(source.outputs)
    if not outputs:
        raise ConfigError(
            f"read_outputs(uid={uid!r}): {type(source).__name__} has one stream; read it with"
            f" read(source, uid={uid!r})"
        )
    if DEAD_LETTERS_TAG in outputs:
        raise ConfigError(
            f"read_outputs(uid={uid!r}): an output cannot have the name {DEAD_LETTERS_TAG!r},"
            " which is the name of the stream of bad records; give it another name"
        )
    strategies: dict[str | None, WatermarkStrategy] = {}
    for output, strategy in (watermarks or {}).items():
        if output not in outputs:
            raise ConfigError(
                f"read_outputs(uid={uid!r}, watermarks=…): no output {output!r}; there are"
                f" {', '.join(outputs)}"
            )
        strategy.check(outputs[output])
        strategies[output] = strategy
    _add_source(graph, ReadFrom(source, strategies), uid, dead_letters, verb="read_outputs")
    # A feed with a tag is what a side output of an operator is, too.
    return {output: Stream(graph, Feed(uid, schema, output)) for output, schema in outputs.items()}


def _add_source(
    graph: GraphBuilder, work: ReadFrom, uid: str, dead_letters: Sink | None, *, verb: str
) -> None:
    if work.source.has_dead_letters != (dead_letters is not None):
        raise ConfigError(
            f"{verb}(uid={uid!r}): on_bad_record='dead_letter' of the source and dead_letters="
            "<the sink that takes them> go together; one of them is missing"
        )
    schema = pa.schema([]) if work.source.outputs else work.source.schema
    operator = graph.add(work, uid=uid, schema=schema)
    if dead_letters is not None:
        graph.add_dead_letters(operator, dead_letters)
