"""The source's rows of Protobuf values: a double of the registry, and messages by hand."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, topic_subject_name_strategy
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from tests.support.arrow_values import python_values
from tests.support.protobuf_messages import framed, message_class
from tests.support.schema_registry_double import SchemaRegistryDouble
from tests.unit.sources.test_kafka_avro import messages, taken

from onceflow.core.errors import BadRecord, ConfigError, SourceUnavailable
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.value_formats import rows_of

UTC = dt.timezone.utc
PAYMENT = """
syntax = "proto3";
package shop;
message Payment {
  int64 id = 1;
  string account = 2;
}
"""
PAYMENT_WITH_FEE = """
syntax = "proto3";
package shop;
message Payment {
  int64 id = 1;
  string account = 2;
  optional double fee = 3;
}
"""
_AWAY = (503, {"error_code": 50003, "message": "leader is away"})


def source(url: Any, **given: Any) -> KafkaSource:
    settings: dict[str, Any] = {"format": "protobuf", "deadline_s": 30.0, **given}
    return KafkaSource("nowhere:1", topic="payments", schema_registry=url, **settings)


def keep(registry: SchemaRegistryDouble, text: str, subject: str = "payments-value") -> int:
    return registry.keep(subject, text, kind="PROTOBUF")


def read(described: KafkaSource, values: Sequence[bytes | None]) -> list[dict[str, Any]]:
    rows = rows_of(described.settings)
    rows.add(messages(values))
    return taken(rows).to_pylist()


EVERYTHING = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
message Everything {
  double a = 1; float b = 2; int32 c = 3; sint32 d = 4; sfixed32 e = 5; uint32 f = 6;
  int64 g = 7; sint64 h = 8; fixed64 i = 9; bool j = 10; string k = 11; bytes l = 12;
  enum Color { RED = 0; BLUE = 3; }
  Color color = 13;
  repeated string tags = 14;
  map<string, int32> counts = 15;
  message Place { string city = 1; optional int32 floor = 2; repeated Color colors = 3; }
  Place place = 16;
  repeated Place places = 17;
  map<int64, Place> by_id = 18;
  oneof choice { string name = 19; int64 number = 20; }
  google.protobuf.Timestamp at = 21;
  google.protobuf.Int64Value wrapped = 22;
  optional string maybe = 23;
}
"""


def test_every_type_of_protobuf_is_a_column(registry: SchemaRegistryDouble) -> None:
    schema_id = keep(registry, EVERYTHING)
    make = message_class(EVERYTHING)
    full = make(a=0.5, b=0.25, c=-1, d=-2, e=-3, f=2**32 - 1, g=-(2**63), h=-5, i=2**64 - 1)
    full.j, full.k, full.l, full.color = True, "ä", b"\0\xff", 3
    full.tags.extend(["x", "y"])
    full.counts["n"] = 7
    full.place.city = "Bonn"
    full.place.floor = 0
    full.place.colors.append(3)
    full.places.add().city = "Ulm"
    full.by_id[5].city = "Hof"
    full.number = 0
    full.at.seconds, full.at.nanos = 1_767_323_045, 678_901_000
    full.wrapped.value = 0
    full.maybe = ""
    later = make(color=9)
    described = source(registry.url)
    place = pa.struct(
        [
            pa.field("city", pa.string(), nullable=False),
            pa.field("floor", pa.int32()),
            pa.field(
                "colors", pa.list_(pa.field("item", pa.string(), nullable=False)), nullable=False
            ),
        ]
    )
    assert described.schema.field("place") == pa.field("place", place)
    assert described.schema.field("i") == pa.field("i", pa.uint64(), nullable=False)
    assert described.schema.field("f") == pa.field("f", pa.int64(), nullable=False)
    assert described.schema.field("name") == pa.field("name", pa.string())
    found, empty, unknown = read(
        described, [framed(schema_id, one) for one in (full, make(), later)]
    )
    ulm = {"city": "Ulm", "floor": None, "colors": list[str]()}
    assert found == {
        **dict(zip("abcdefgh", [0.5, 0.25, -1, -2, -3, 2**32 - 1, -(2**63), -5], strict=True)),
        "i": 2**64 - 1,
        "j": True,
        "k": "ä",
        "l": b"\0\xff",
        "color": "BLUE",
        "tags": ["x", "y"],
        "counts": [("n", 7)],
        "places": [ulm],
        "place": {"city": "Bonn", "floor": 0, "colors": ["BLUE"]},
        "by_id": [(5, {**ulm, "city": "Hof"})],
        "name": None,
        "number": 0,
        "wrapped": 0,
        "maybe": "",
        "at": dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    }
    nullable = ("place", "name", "number", "at", "wrapped", "maybe")
    assert {name for name, value in empty.items() if value is None} == set(nullable)
    assert (empty["color"], unknown["color"]) == ("RED", "9")


def test_fields_are_found_by_their_numbers_in_older_and_newer_versions(
    registry: SchemaRegistryDouble,
) -> None:
    old = keep(registry, PAYMENT)
    read_as = keep(registry, PAYMENT_WITH_FEE)
    described = source(registry.url)
    assert described.schema.names == ["id", "account", "fee"]
    newer = PAYMENT_WITH_FEE.replace("string account = 2;", "string konto = 2; bool more = 9;")
    new = keep(registry, newer)
    values = [
        framed(old, message_class(PAYMENT)(id=1, account="a")),
        framed(new, message_class(newer)(id=2, konto="b", fee=0.5, more=True)),
        framed(read_as, message_class(PAYMENT_WITH_FEE)(id=3, account="c")),
    ]
    assert read(described, values) == [
        {"id": 1, "account": "a", "fee": None},
        {"id": 2, "account": "b", "fee": 0.5},
        {"id": 3, "account": "c", "fee": None},
    ]


@pytest.mark.parametrize(
    ("before", "after", "value", "shown"),
    [
        ("int64 x = 2;", "int32 x = 2;", 2**40 + 3, "written as int64 and is read as int32"),
        ("int32 x = 2;", "sint32 x = 2;", -5, "written as int32 and is read as sint32"),
        ("int32 x = 2;", "string x = 2;", 5, "written as int32 and is read as string"),
        ("uint64 x = 2;", "int64 x = 2;", 2**63, "written as uint64 and is read as int64"),
        ("repeated int32 x = 2;", "int32 x = 2;", [5, 6], "as a list of int32"),
        ("map<string, fixed32> x = 2;", "map<string, float> x = 2;", {"a": 5}, "as fixed32 and"),
        ("Part x = 2; message Part { int64 n = 1; }", "Part x = 2; message Part { bool n = 1; }",
         {"n": 5}, "field M.Part.n (number 1) was written as int64 and is read as bool"),
    ],
)  # fmt: skip
def test_a_field_whose_type_reads_as_another_value_makes_bad_records(
    registry: SchemaRegistryDouble, before: str, after: str, value: Any, shown: str
) -> None:
    """The same number with another type: Protobuf itself reads it without an error."""
    texts = [f'syntax = "proto3"; message M {{ int64 id = 1; {one} }}' for one in (before, after)]
    old, new = (keep(registry, text) for text in texts)
    described = source(registry.url, on_bad_record="dead_letter")
    rows = rows_of(described.settings)
    written = framed(old, message_class(texts[0])(id=1, x=value))
    rows.add(messages([written, framed(new, message_class(texts[1])(id=2))]))
    assert [row["id"] for row in taken(rows).to_pylist()] == [2]
    (letter,) = rows.refusals.take_letters()
    assert f"its schema id {old}: field M." in letter.reason
    assert shown in letter.reason
    # Who leaves the field out reads the rest.
    others = source(registry.url, schema="id BIGINT NOT NULL")
    assert read(others, [written]) == [{"id": 1}]


def test_a_field_whose_type_became_wider_is_read_as_it_was_written(
    registry: SchemaRegistryDouble,
) -> None:
    texts = [
        'syntax = "proto3"; enum E { A = 0; B = 1; }'
        f" message M {{ {a} a = 1; {b} b = 2; {c} c = 3; {d} d = 4; }}"
        for a, b, c, d in [
            ("int32", "string", "bool", "E"),
            ("int64", "bytes", "int32", "int32"),
        ]
    ]
    old = keep(registry, texts[0])
    keep(registry, texts[1])
    value = framed(old, message_class(texts[0])(a=-5, b="x", c=True, d=1))
    assert read(source(registry.url), [value]) == [{"a": -5, "b": b"x", "c": 1, "d": 1}]


SEVERAL = """
syntax = "proto3";
package shop;
message Order { int64 id = 1; message Line { string sku = 1; } message Note { string text = 1; } }
message Payment { int64 id = 1; string account = 2; }
"""


def test_indexes_say_which_message_of_its_schema_a_value_is(
    registry: SchemaRegistryDouble,
) -> None:
    one = keep(registry, SEVERAL)
    # There the same messages stand in other places.
    other = keep(registry, SEVERAL.replace("message Order", "message First {}\nmessage Order"))
    payment = message_class(SEVERAL, "Payment")(id=1, account="a")
    note = message_class(SEVERAL, "shop.Order.Note")(text="n")
    values = [
        framed(one, payment, b"\x02\x02"),
        framed(other, payment, b"\x02\x04"),
        framed(one, note, b"\x04\x00\x02"),
        framed(one, message_class(SEVERAL)(id=9)),
        framed(one, payment, b"\x02\x10"),
        framed(one, payment, b"\x80")[:6],
    ]
    described = source(registry.url, message="Payment", on_bad_record="dead_letter")
    rows = rows_of(described.settings)
    rows.add(messages(values))
    assert taken(rows).to_pylist() == [{"id": 1, "account": "a"}] * 2
    reasons = [letter.reason for letter in rows.refusals.take_letters()]
    assert "it is shop.Order.Note, but shop.Payment is expected" in reasons[0]
    assert "it is shop.Order, but shop.Payment is expected" in reasons[1]
    assert "it is message [8], which its schema lacks" in reasons[2]
    assert "message indexes at its start are cut short" in reasons[3]
    notes = source(registry.url, message="shop.Order.Note", on_bad_record="drop")
    assert read(notes, values) == [{"text": "n"}]


def test_what_confluents_serializer_registers_and_writes_is_read(
    registry: SchemaRegistryDouble,
) -> None:
    """It registers compiled descriptors, of what is imported, too."""
    imported = 'syntax = "proto3"; package shop; message Money { int64 cents = 1; }'
    text = """
    syntax = "proto3";
    package shop;
    import "money.proto";
    import "google/protobuf/timestamp.proto";
    message Order { message Line { Money price = 1; google.protobuf.Timestamp at = 2; } }
    """
    make = message_class(text, "Line", money=imported)
    message = make()
    message.price.cents, message.at.seconds = 5, 60
    with SchemaRegistryClient({"url": registry.url}) as client:
        # Its constructor has another name, which type checkers do not find.
        serializer: Any = cast("Any", ProtobufSerializer)(
            make, client, {"subject.name.strategy": topic_subject_name_strategy}
        )
        value = serializer(message, SerializationContext("payments", MessageField.VALUE))
    assert read(source(registry.url, message="Line"), [value]) == [
        {"price": {"cents": 5}, "at": dt.datetime(1970, 1, 1, 0, 1, tzinfo=UTC)}
    ]


def test_schemas_that_refer_to_others_are_read_with_them(registry: SchemaRegistryDouble) -> None:
    money = 'syntax = "proto3"; message Money { int64 cents = 1; }'
    order = """
    syntax = "proto3";
    import "money.proto";
    import "confluent/meta.proto";
    import "confluent/type/decimal.proto";
    message Order {
      Money price = 1;
      confluent.type.Decimal rate = 2 [(confluent.field_meta) = { doc: "of taxes" }];
    }
    """
    keep(registry, money, "money")
    schema_id = registry.keep(
        "payments-value", order, kind="PROTOBUF", references={"money.proto": ("money", 1)}
    )
    message = message_class(order, money=money)()
    message.price.cents = 5
    assert read(source(registry.url), [framed(schema_id, message)]) == [
        {"price": {"cents": 5}, "rate": None}
    ]


def test_columns_of_the_user_s_own_are_taken_by_name_and_checked_at_the_start(
    registry: SchemaRegistryDouble,
) -> None:
    text = 'syntax = "proto3"; message Node { int32 id = 1; string name = 2; Node next = 3; }'
    schema_id = keep(registry, text)
    value = framed(schema_id, message_class(text)(id=300, name="a"))
    described = source(registry.url, schema="name STRING, id BIGINT")
    assert read(described, [value]) == [{"name": "a", "id": 300}]
    with pytest.raises(BadRecord, match="offset 0: column .id.: a value does not fit int8"):
        read(source(registry.url, schema="id TINYINT"), [value])
    for schema, why in [
        ("nam STRING", r"message Node has no fields \['nam'\], only id, name, next"),
        ("name BIGINT", "column 'name': it was written as string and is read as int64"),
        (None, "field 'next' is of message Node, which contains itself.* leave out .*'next' by"),
    ]:
        with pytest.raises(ConfigError, match=f"subject 'payments-value': .*{why}"):
            _ = source(registry.url, schema=schema).schema


def test_bad_records_are_left_out_with_their_origin_and_the_others_stay_in_order(
    registry: SchemaRegistryDouble,
) -> None:
    text = PAYMENT.replace("}", "  google.protobuf.Timestamp at = 3;\n}").replace(
        "message", 'import "google/protobuf/timestamp.proto";\nmessage'
    )
    schema_id = keep(registry, text)
    json_id = registry.keep("other", {"type": "object"}, kind="JSON")
    make = message_class(text)
    good = [framed(schema_id, make(id=number, account="a")) for number in range(3)]
    timeless = make(id=9)
    timeless.at.seconds = 2**62
    values = [
        good[0],
        None,
        b'{"id": 1}',
        good[1],
        good[1][:-1],
        framed(json_id, make(id=1)),
        framed(schema_id, timeless),
        good[2],
    ]
    described = source(registry.url, on_bad_record="dead_letter", include_metadata=True)
    rows = rows_of(described.settings)
    rows.add(messages(values, first=50))
    found = taken(rows).to_pylist()
    assert [(one["id"], one["_offset"]) for one in found] == [(0, 50), (1, 53), (2, 57)]
    letters = rows.refusals.take_letters()
    assert [(letter.topic, letter.offset) for letter in letters] == [
        ("payments", offset) for offset in (51, 52, 54, 55, 56)
    ]
    whys = [
        "tombstone",
        "does not begin with a zero byte",
        "",
        "but is JSON",
        "allows the years",
    ]
    for letter, why in zip(letters, whys, strict=True):
        assert why in letter.reason


@pytest.mark.parametrize(
    ("fields", "odd"),
    [
        ("optional string s = 2;", b"\x12\x02\xff\xfe"),
        (
            "repeated Part parts = 2; message Part { optional string s = 1; }",
            b"\x12\x04\x0a\x02\xff\xfe",
        ),
    ],
)
def test_a_text_of_proto2_that_is_not_utf_8_is_a_bad_record(
    registry: SchemaRegistryDouble, fields: str, odd: bytes
) -> None:
    schema_id = keep(
        registry, f'syntax = "proto2"; message M {{ required int64 id = 1; {fields} }}'
    )
    start = framed(schema_id, message_class(PAYMENT)())
    described = source(registry.url, on_bad_record="dead_letter")
    rows = rows_of(described.settings)
    rows.add(messages([start + b"\x08\x01", start + b"\x08\x02" + odd, start + b"\x08\x03"]))
    assert [row["id"] for row in taken(rows).to_pylist()] == [1, 3]
    (letter,) = rows.refusals.take_letters()
    assert "utf8" in letter.reason


def test_fields_with_the_names_of_methods_of_pythons_messages_are_read(
    registry: SchemaRegistryDouble,
) -> None:
    names = ["HasField", "ParseFromString", "SerializeToString", "DESCRIPTOR", "Clear", "class"]
    fields = " ".join(f"optional int32 {name} = {at};" for at, name in enumerate(names, 1))
    schema_id = keep(registry, f'syntax = "proto3"; message M {{ {fields} }}')
    start = framed(schema_id, message_class(PAYMENT)())
    value = b"".join(bytes([at << 3, at]) for at in range(1, len(names)))
    expected = {**{name: at for at, name in enumerate(names, 1)}, "class": None}
    assert read(source(registry.url), [start + value]) == [expected]


def test_schemas_that_are_known_are_read_while_the_registry_is_away_and_a_new_one_is_waited_for(
    registry: SchemaRegistryDouble,
) -> None:
    old = keep(registry, PAYMENT)
    payment = message_class(PAYMENT)(id=1, account="a")
    rows = rows_of(source(registry.url).settings)
    rows.add(messages([framed(old, payment)]))
    assert taken(rows).num_rows == 1
    registry.failing = _AWAY
    new = keep(registry, PAYMENT_WITH_FEE)
    rows.add(messages([framed(old, payment)]))
    assert taken(rows).num_rows == 1
    asked = len(registry.asked)
    rows.add(messages([framed(new, payment)]))
    until = time.monotonic() + 60
    while len(registry.asked) < asked + 2:
        assert not rows.ready()
        assert time.monotonic() < until
        time.sleep(0.002)
    registry.failing = None
    assert taken(rows).to_pylist() == [{"id": 1, "account": "a"}]


def test_registry_that_stays_away_ends_the_start_or_the_attempt_by_name(
    registry: SchemaRegistryDouble,
) -> None:
    schema_id = keep(registry, PAYMENT)
    described = source(registry.url, deadline_s=0.2)
    rows = rows_of(described.settings)
    registry.failing = _AWAY
    rows.add(messages([framed(schema_id, message_class(PAYMENT)(id=1))], first=41))
    with pytest.raises(SourceUnavailable) as caught:
        taken(rows)
    assert f"payments-2 offset 41 needs schema id {schema_id}" in str(caught.value)
    with pytest.raises(
        SourceUnavailable, match=r"leader is away.*did not answer within 0.2 s; start it"
    ):
        _ = source(registry.url, deadline_s=0.2, schema="id BIGINT").schema


def test_id_that_the_registry_never_knows_makes_a_bad_record(
    registry: SchemaRegistryDouble,
) -> None:
    known = keep(registry, PAYMENT)
    payment = message_class(PAYMENT)(id=1, account="a")
    values = [framed(known, payment), framed(77, payment)]
    with pytest.raises(BadRecord) as caught:
        read(source(registry.url, deadline_s=0.2), values)
    assert "payments-2 offset 1: its schema id 77 is not known to the registry" in str(caught.value)
    dropping = source(registry.url, deadline_s=0.2, on_bad_record="drop")
    assert read(dropping, values) == [{"id": 1, "account": "a"}]


@pytest.mark.parametrize(
    ("text", "kind", "fragment"),
    [
        ("message Broken {", "PROTOBUF", "it does not compile: the schema:1"),
        ('syntax = "proto3";', "PROTOBUF", "its Protobuf schema has no message"),
        ('syntax = "proto3"; import "gone.proto";', "PROTOBUF", "gone.proto"),
        ('{"type": "string"}', "JSON", "its latest version is JSON, but PROTOBUF is required"),
    ],
)
def test_subject_whose_schema_is_no_message_is_refused_by_name(
    registry: SchemaRegistryDouble, text: str, kind: str, fragment: str
) -> None:
    registry.keep("payments-value", text, kind=kind)
    with pytest.raises(ConfigError) as caught:
        _ = source(registry.url).schema
    assert "subject 'payments-value': " in str(caught.value)
    assert fragment in str(caught.value)


def test_message_that_the_schema_lacks_is_refused_with_those_it_has(
    registry: SchemaRegistryDouble,
) -> None:
    keep(registry, SEVERAL)
    with pytest.raises(ConfigError, match=r"message='Lin' names 0 .*shop\.Order\.Line"):
        _ = source(registry.url, message="Lin").schema
    with pytest.raises(ConfigError, match="no messages; omit message="):
        source(registry.url, format="avro", message="Payment")
    with pytest.raises(ConfigError, match=r"from one subject: give subject=$"):
        KafkaSource(
            "nowhere:1",
            topic=["a", "b"],
            format="protobuf",
            schema="id INT",
            schema_registry=registry.url,
        )


CLOSED = """
syntax = "proto2";
message Order {
  enum State { NONE = 0; OPEN = 1; PAID = 2; %s }
  required int64 id = 1;
  optional State state = 2 [default = PAID];
  repeated State history = 3;
  repeated State packed = 4 [packed = true];
  map<string, State> by_shop = 5;
  message Line { optional State state = 1; }
  repeated Line lines = 6;
  oneof choice { State chosen = 7; string note = 8; }
}
"""


def test_a_number_that_a_closed_enum_does_not_know_is_that_number_and_never_left_out(
    registry: SchemaRegistryDouble,
) -> None:
    """Protobuf puts such a number aside for enums of proto2, as if nothing had been written."""
    old_id = keep(registry, CLOSED % "")
    described = source(registry.url)
    assert described.schema.field("state") == pa.field("state", pa.string())
    newer = message_class(CLOSED % "SENT = -3;")
    full = newer(id=1, state="SENT", history=["OPEN", "SENT", "PAID"], packed=["SENT", "OPEN"])
    full.by_shop["a"], full.by_shop["b"] = -3, 1
    full.lines.add().state = -3
    full.chosen = -3
    known = newer(id=2, state="OPEN", history=["PAID"], packed=["OPEN"], note="x")
    found, plain, absent = read(
        described, [framed(old_id, one) for one in (full, known, newer(id=3))]
    )
    found["by_shop"].sort()
    assert found == {
        "id": 1,
        "state": "-3",
        "history": ["OPEN", "-3", "PAID"],
        "packed": ["-3", "OPEN"],
        "by_shop": [("a", "-3"), ("b", "OPEN")],
        "lines": [{"state": "-3"}],
        "chosen": "-3",
        "note": None,
    }
    assert (plain["state"], plain["history"], plain["note"]) == ("OPEN", ["PAID"], "x")
    assert (absent["state"], absent["chosen"], absent["history"]) == (None, None, [])


TIMES = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
message Event {
  int64 id = 1;
  google.protobuf.Timestamp at = 2;
  repeated google.protobuf.Timestamp seen = 3;
  map<string, google.protobuf.Timestamp> by_shop = 4;
  message Place { google.protobuf.Timestamp at = 1; }
  Place place = 5;
}
"""
FINE = pa.timestamp("ns", "UTC")
PLACES_OF_TIMES: dict[str, pa.DataType] = {
    "at": FINE,
    "seen": pa.list_(FINE),
    "by_shop": pa.map_(pa.string(), FINE),
    "place": pa.struct([("at", FINE)]),
}


def event_at(where: str, seconds: int, nanos: int) -> Any:
    event = message_class(TIMES)(id=nanos)
    at: Any = event.at
    match where:
        case "seen":
            at = event.seen.add()
        case "by_shop":
            at = event.by_shop["x"]
        case "place":
            at = event.place.at
        case _:
            pass
    at.seconds, at.nanos = seconds, nanos
    return event


@pytest.mark.parametrize("where", PLACES_OF_TIMES)
def test_a_timestamp_finer_than_its_column_is_a_bad_record_and_never_cut_off(
    registry: SchemaRegistryDouble, where: str
) -> None:
    schema_id = keep(registry, TIMES)
    rows = rows_of(source(registry.url, on_bad_record="dead_letter").settings)
    times = [(-1, 999_999_000), (1, 1), (-(2**33), 999)]
    rows.add(messages([framed(schema_id, event_at(where, *time)) for time in times]))
    assert taken(rows).column("id").to_pylist() == [999_999_000]
    letters = rows.refusals.take_letters()
    assert ["1 ns is finer" in letters[0].reason, "999 ns is finer" in letters[1].reason] == [
        True,
        True,
    ]


@pytest.mark.parametrize("where", PLACES_OF_TIMES)
def test_a_column_of_nanoseconds_has_a_timestamp_to_its_last_digit(
    registry: SchemaRegistryDouble, where: str
) -> None:
    schema_id = keep(registry, TIMES)
    columns = pa.schema([("id", pa.int64()), (where, PLACES_OF_TIMES[where])])
    described = source(registry.url, schema=columns, on_bad_record="dead_letter")
    least, most = divmod(1 - 2**63, 10**9), divmod(2**63 - 1, 10**9)
    beyond = (least[0], least[1] - 1), (most[0], most[1] + 1)
    times = [(1, 1), least, most, (-1, 999_999_999), *beyond]
    rows = rows_of(described.settings)
    rows.add(messages([framed(schema_id, event_at(where, *time)) for time in times]))
    column = python_values(taken(rows).column(where))
    keys: dict[str, Any] = {"seen": 0, "by_shop": "x", "place": "at"}
    instants = [value[keys[where]] if where in keys else value for value in column]
    assert [instant.value for instant in instants] == [1_000_000_001, 1 - 2**63, 2**63 - 1, -1]
    reasons = [letter.reason for letter in rows.refusals.take_letters()]
    assert all("beyond the years 1677 to 2262" in reason for reason in reasons)
    assert len(reasons) == 2
