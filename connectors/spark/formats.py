"""The Spark formats. Each has a name, and creates its sink, source or reader from options.

A format is a class. Spark creates instances where it plans: on the driver, in a separate Python
worker. The modules of a format are imported when the format is used, because Spark asks for the
names of all installed formats.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSource
from typing_extensions import override

from onceflow.connectors.spark.reused_worker import spare_imports
from onceflow.core.imports import naming_extras

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from onceflow.connectors.spark.options.option_table import OptionTable
    from onceflow.connectors.spark.options.sql_reads import SqlRead
    from onceflow.connectors.spark.options.words import OptionWords
    from onceflow.connectors.spark.readers.sql import SqlReader
    from onceflow.core.spi import Sink, Source


class CheckpointsFormat(DataSource):
    """The format `onceflow-checkpoints`: the checkpoints and savepoints; `readers.checkpoints`."""

    @classmethod
    @override
    def name(cls) -> str:
        return "onceflow-checkpoints"

    @override
    def schema(self) -> StructType:
        from onceflow.connectors.spark.readers.checkpoints import checkpoints_schema

        return checkpoints_schema()

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        from onceflow.connectors.spark.readers.checkpoints import CheckpointsReader

        return CheckpointsReader(self.options, schema)


class StateFormat(DataSource):
    """The format `onceflow-state`: one operator's state in a checkpoint; see `readers.state`."""

    @classmethod
    @override
    def name(cls) -> str:
        return "onceflow-state"

    @override
    def schema(self) -> StructType:
        from onceflow.connectors.spark.readers.state import state_schema

        return state_schema(self.options)

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        from onceflow.connectors.spark.readers.state import StateFrameReader

        return StateFrameReader(self.options, schema)


class SavepointFormat(DataSource):
    """The format `onceflow-savepoint`: a new savepoint; see `batch.savepoint_writer`."""

    @classmethod
    @override
    def name(cls) -> str:
        return "onceflow-savepoint"

    @override
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from onceflow.connectors.spark.batch.savepoint_writer import savepoint_writer

        return savepoint_writer(self.options, schema, overwrite=overwrite)


STATE_FORMATS: tuple[type[DataSource], ...] = (CheckpointsFormat, SavepointFormat, StateFormat)
"""The formats of this module. Spark discovers each by a module `pyspark_onceflow_…`."""


class SinkFormat(DataSource):
    """A format that writes to the sink of `make_sink`, with `writeStream` and `write`.

    Each format has its own class: Spark pickles the class to where it plans, and its instances to
    where they commit.
    """

    format_name: ClassVar[str]

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._plans = True
        """False in an unpickled instance, where Spark commits a batch that was planned elsewhere.
        """

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_plans": False}

    @classmethod
    @override
    def name(cls) -> str:
        return cls.format_name

    @classmethod
    @abstractmethod
    def make_sink(cls, options: Mapping[str, str]) -> Sink:
        """Return the sink that `options` describe. They include the protocol's own options."""

    @classmethod
    @abstractmethod
    def write_words(cls) -> OptionWords:
        """Return the names of the options in the sink's errors."""

    @override
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from onceflow.connectors.spark.streaming.writer import (
            committing_writer,
            make_planned_writer,
        )

        make = make_planned_writer if self._plans else committing_writer
        words = self.write_words()
        with words.translate_errors():
            made = make(self.make_sink, _lower(self.options), schema, overwrite=overwrite)
        spare_imports()
        return made.speaking(words)

    @override
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from onceflow.connectors.spark.batch.writer import batch_writer

        words = self.write_words()
        with words.translate_errors():
            made = batch_writer(self.make_sink, _lower(self.options), schema, overwrite=overwrite)
        spare_imports()
        return made.speaking(words)


class _OwnFormat(SinkFormat):
    """A format of onceflow, whose options are a table."""

    @staticmethod
    @abstractmethod
    def write_options() -> OptionTable[Sink]:
        """Return the options for writing."""

    @classmethod
    @override
    def make_sink(cls, options: Mapping[str, str]) -> Sink:
        with naming_extras():
            return cls.write_options().make(options)

    @classmethod
    @override
    def write_words(cls) -> OptionWords:
        with naming_extras():
            return cls.write_options().words


def _lower(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


class _SqlFormat(_OwnFormat):
    """A format of a database that can also be read."""

    @staticmethod
    @abstractmethod
    def read_options() -> OptionTable[SqlRead]:
        """Return the options for reading."""

    @override
    def schema(self) -> StructType:
        from onceflow.connectors.spark.readers.sql import sql_schema

        table = self.read_options()
        with naming_extras(), table.words.translate_errors():
            return sql_schema(table.make(self.options).source)

    @override
    def reader(self, schema: StructType) -> SqlReader:
        from onceflow.connectors.spark.readers.sql import sql_reader

        table = self.read_options()
        with naming_extras():
            read = table.make(self.options)
        with table.words.translate_errors():
            reader = sql_reader(read.source, schema, bounds=read.bounds, tasks=read.tasks)
        return reader.speaking(table.words)


class PostgresFormat(_SqlFormat):
    """The format `onceflow-postgres`."""

    format_name = "onceflow-postgres"

    @staticmethod
    @override
    def write_options() -> OptionTable[Sink]:
        from onceflow.connectors.spark.options.sql_reads import describe_postgres_writes

        return describe_postgres_writes()

    @staticmethod
    @override
    def read_options() -> OptionTable[SqlRead]:
        from onceflow.connectors.spark.options.sql_reads import POSTGRES_READ

        return POSTGRES_READ


class PostgresChangesFormat(DataSource):
    """The format `onceflow-postgres-changes`: a table and its changes, for `readStream`."""

    @classmethod
    @override
    def name(cls) -> str:
        return "onceflow-postgres-changes"

    @override
    def schema(self) -> StructType:
        from onceflow.connectors.spark.arrow_rows import spark_schema

        with naming_extras():
            from onceflow.connectors.spark.options.postgres_changes import CHANGES_READ

        source: Source = CHANGES_READ.make(self.options)
        with CHANGES_READ.words.translate_errors():
            return spark_schema(source.schema)

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from onceflow.connectors.spark.versions import SparkInterface, require

        # Without the batch's start, a reader would not know after a crash where to continue.
        require(SparkInterface.READ_LIMITS, self.name())
        with naming_extras():
            from onceflow.connectors.spark.options.postgres_changes import CHANGES_READ
            from onceflow.connectors.spark.readers.postgres_changes import ChangesStreamReader

        read, words = CHANGES_READ.make(self.options), CHANGES_READ.words
        with words.translate_errors():
            return ChangesStreamReader(read, schema).speaking(words)


class MySQLFormat(_SqlFormat):
    """The format `onceflow-mysql`, also for MariaDB."""

    format_name = "onceflow-mysql"

    @staticmethod
    @override
    def write_options() -> OptionTable[Sink]:
        from onceflow.connectors.spark.options.sql_reads import describe_mysql_writes

        return describe_mysql_writes()

    @staticmethod
    @override
    def read_options() -> OptionTable[SqlRead]:
        from onceflow.connectors.spark.options.sql_reads import MYSQL_READ

        return MYSQL_READ


class SQLiteFormat(_OwnFormat):
    """The format `onceflow-sqlite`, for a session whose executors all use one disk."""

    format_name = "onceflow-sqlite"

    @staticmethod
    @override
    def write_options() -> OptionTable[Sink]:
        from onceflow.connectors.spark.options.sql_reads import describe_sqlite_writes

        return describe_sqlite_writes()


class KafkaFormat(_OwnFormat):
    """The format `onceflow-kafka`."""

    format_name = "onceflow-kafka"

    @staticmethod
    @override
    def write_options() -> OptionTable[Sink]:
        from onceflow.connectors.spark.options.kafka import KAFKA_WRITE

        return KAFKA_WRITE

    @override
    def schema(self) -> StructType:
        from onceflow.connectors.spark.arrow_rows import spark_schema

        with naming_extras():
            from onceflow.connectors.spark.options.kafka import schema_of_reading

        return spark_schema(schema_of_reading(self.options))

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        with naming_extras():
            from onceflow.connectors.spark.options.kafka import KAFKA_READ_STREAM
            from onceflow.connectors.spark.readers.kafka_stream import KafkaStreamReader

        reading, words = KAFKA_READ_STREAM.make(self.options), KAFKA_READ_STREAM.words
        with words.translate_errors():
            return KafkaStreamReader(reading.settings, schema, reading.limits).speaking(words)

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        with naming_extras():
            from onceflow.connectors.spark.options.kafka import KAFKA_READ
            from onceflow.connectors.spark.readers.kafka import KafkaBatchReader

        reading, words = KAFKA_READ.make(self.options), KAFKA_READ.words
        with words.translate_errors():
            return KafkaBatchReader(reading.settings, schema, reading.limits).speaking(words)


class FilesFormat(_OwnFormat):
    """The format `onceflow-files`."""

    format_name = "onceflow-files"

    @staticmethod
    @override
    def write_options() -> OptionTable[Sink]:
        from onceflow.connectors.spark.options.files import FILES_WRITE

        return FILES_WRITE

    @override
    def schema(self) -> StructType:
        from onceflow.connectors.spark.readers.files import files_schema

        return files_schema(self.options)

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        from onceflow.connectors.spark.options.files import FILES_READ
        from onceflow.connectors.spark.readers.files import FilesBatchReader, files_read

        return FilesBatchReader(files_read(self.options), schema).speaking(FILES_READ.words)

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from onceflow.connectors.spark.options.files import FILES_READ
        from onceflow.connectors.spark.readers.files import FilesStreamReader, files_read

        return FilesStreamReader(files_read(self.options), schema).speaking(FILES_READ.words)


FORMATS: tuple[type[DataSource], ...] = (
    FilesFormat,
    KafkaFormat,
    MySQLFormat,
    PostgresChangesFormat,
    PostgresFormat,
    SQLiteFormat,
    *STATE_FORMATS,
)
"""The formats of this package. Spark discovers each by a module `pyspark_onceflow_…`."""


def register(spark: SparkSession) -> None:
    """Make every format of onceflow known to `spark`. A second call changes nothing.

    Spark looks formats up in the session of the thread that writes or reads, and a thread of a
    pool has none: call it in each thread, as `ThreadPoolExecutor(8, initializer=register,
    initargs=(spark,))` does. With a local master Spark's Python workers run this interpreter from
    then on, unless `PYSPARK_PYTHON` names another one.

    Not needed in the main thread where onceflow is installed for the `python3` that Spark runs: it
    finds the formats there by itself. Runs on the driver, or in a client of Spark Connect.

    Raises:
        ConfigError: This Spark has no Python formats.
    """
    from onceflow.connectors.spark.driver_identity import name_application
    from onceflow.connectors.spark.packages import ShippedFormat
    from onceflow.connectors.spark.versions import SparkInterface, require

    require(SparkInterface.FORMATS, "connectors.register")
    session = _session_in_jvm(spark)
    if session is not None:
        from onceflow.connectors.spark.local_workers import start_workers_fast

        start_workers_fast(spark.sparkContext)
        name_application(spark.sparkContext)
        jvm = cast("Any", spark.sparkContext)._jvm
        # Spark looks formats up in the active session of the thread, which a new thread lacks.
        getattr(jvm, "org.apache.spark.sql.classic.SparkSession").setActiveSession(session)
    for format_class in FORMATS:
        # A second registration would replace the format, with a warning for each.
        if session is not None and _is_registered(session, format_class.name()):
            continue
        try:
            spark.dataSource.register(cast("type[DataSource]", ShippedFormat(format_class)))
        except PySparkException as error:
            # The installation has made Spark discover this same format already.
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise


def _session_in_jvm(spark: SparkSession) -> Any:
    """Return the JVM session of `spark`, or None in a client of Spark Connect."""
    return getattr(spark, "_jsparkSession", None)


def _is_registered(session: Any, name: str) -> bool:
    """Return True if the session has a format of that name. A second registration would warn."""
    return bool(session.sessionState().dataSourceManager().dataSourceExists(name))


def data_source(name: str, make_sink: Callable[[Mapping[str, str]], Sink]) -> type[DataSource]:
    """Return a format for `spark.dataSource.register`, which writes into any sink.

    Args:
        name: The name in `writeStream.format(name)` and `write.format(name)`.
        make_sink: Creates the sink from the query's options, whose names are found in any case.
            Spark calls it repeatedly, on the driver and on executors, so it must open no
            connection. Reading an option that is not given raises ConfigError; so does an option
            that `make_sink` has not read. The function is pickled; a function of the program's own
            script is pickled by value.
    """

    def make(options: Mapping[str, str]) -> Sink:
        from onceflow.connectors.spark.options.option_table import own_sink

        return own_sink(name, make_sink, options)

    def words() -> OptionWords:
        from onceflow.connectors.spark.options.words import OptionWords

        return OptionWords()

    members: dict[str, Any] = {
        "__doc__": f"Format {name!r} of the program that made it.",
        "__module__": "__main__",
        "format_name": name,
        "make_sink": staticmethod(make),
        "write_words": staticmethod(words),
    }
    return type(f"SinkFormat_{name}", (SinkFormat,), members)
