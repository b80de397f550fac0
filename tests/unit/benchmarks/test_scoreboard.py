"""The verdict, the schedule and the table of benchmarks/scoreboard."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.scoreboard.contestants.all import list_contestants
from benchmarks.scoreboard.records import compute_model, describe_payments
from benchmarks.scoreboard.report import make_rows, to_markdown, to_terminal
from benchmarks.scoreboard.run import Blow, Outcome
from benchmarks.scoreboard.schedule import StrikeKind, draw_schedule
from benchmarks.scoreboard.verdict import Verdict, judge_payments, judge_totals

MODEL = compute_model(describe_payments(500, seed=3))
ROWS = [(id_, account, amount) for id_, (account, amount) in MODEL.payments.items()]
TOTALS = [(account, total, n) for account, (total, n) in MODEL.totals.items()]
EXACT = Verdict(expected=500, lost=0, doubled=0, altered=0, wrong_totals=0, prepared=0)


def test_rows_of_the_model_are_exact() -> None:
    assert judge_payments(MODEL, ROWS) == (0, 0, 0)
    assert judge_totals(MODEL, TOTALS) == 0


def test_the_model_knows_the_last_payment_of_each_partition() -> None:
    partition = {id_: int(account[-1]) % 2 for id_, (account, _) in MODEL.payments.items()}
    last = {partition[id_]: id_ for id_ in sorted(MODEL.payments)}
    assert sorted(MODEL.last_ids) == sorted(last.values())
    assert len(MODEL.last_ids) == 2


def test_a_missing_row_is_lost() -> None:
    assert judge_payments(MODEL, ROWS[1:]) == (1, 0, 0)


def test_each_copy_of_a_row_is_doubled() -> None:
    assert judge_payments(MODEL, [*ROWS, ROWS[7], ROWS[7], ROWS[8]]) == (0, 3, 0)


def test_another_amount_or_account_is_altered_and_so_is_an_unknown_id() -> None:
    id_, account, amount = ROWS[0]
    changed = [(id_, account, amount + 1), (ROWS[1][0], "nobody", ROWS[1][2]), *ROWS[2:]]
    assert judge_payments(MODEL, changed) == (0, 0, 2)
    assert judge_payments(MODEL, [*ROWS, (500, account, amount)]) == (0, 0, 1)


def test_a_doubled_row_does_not_hide_a_missing_one() -> None:
    assert judge_payments(MODEL, [ROWS[1], *ROWS[1:]]) == (1, 1, 0)


def test_wrong_missing_and_unknown_totals_are_counted() -> None:
    account, total, n = TOTALS[0]
    assert judge_totals(MODEL, [(account, total + 1, n), *TOTALS[1:]]) == 1
    assert judge_totals(MODEL, [(account, total, n + 1), *TOTALS[1:]]) == 1
    assert judge_totals(MODEL, TOTALS[1:]) == 1
    assert judge_totals(MODEL, [*TOTALS, ("nobody", 0, 0)]) == 1


def test_each_difference_makes_a_verdict_inexact() -> None:
    assert EXACT.is_exact
    assert replace(EXACT, wrong_totals=None).is_exact
    for name in ("lost", "doubled", "altered", "wrong_totals", "prepared"):
        assert not replace(EXACT, **{name: 1}).is_exact, name


def test_equal_seeds_draw_equal_schedules_with_each_kind_once_in_order() -> None:
    first = draw_schedule(5, 50.0)
    assert first == draw_schedule(5, 50.0) != draw_schedule(6, 50.0)
    assert {strike.kind for strike in first.strikes} == set(StrikeKind)
    assert first.strikes[-1].kind is StrikeKind.FREEZE
    moments = [strike.at_s for strike in first.strikes]
    assert moments == sorted(moments)
    assert 0 < moments[0] < moments[-1] < 50.0


def test_the_table_adds_up_runs_and_says_what_was_not_run() -> None:
    contestants = list_contestants()
    names = [contestant.name for contestant in contestants]
    assert len(names) == len(set(names))
    kill = Blow(StrikeKind.WORKER, struck=True, recovery_s=2.0)
    cut = Blow(StrikeKind.CONNECTIONS, struck=True, recovery_s=9.0)
    ran = Outcome(names[1], 1, 500, 9.0, 1.0, (kill, cut), 2, replace(EXACT, doubled=4))
    outcomes = [
        Outcome(names[0], 1, 500, 9.0, 1.0, (kill,), 2, EXACT),
        ran,
        replace(ran, seed=2, verdict=replace(EXACT, doubled=3)),
        Outcome(names[2], 1, 500, 9.0, 1.0, not_run="no such package"),
    ]
    ours, spark, absent = make_rows(contestants, outcomes)
    assert ours.is_exact
    assert not spark.is_exact
    assert spark.add_up("doubled") == 7
    assert spark.recovery_s == 2.0
    assert absent.reason == "no such package"
    assert "not run: no such package" in to_terminal([ours, spark, absent])
    assert "| 7 |" in to_markdown([ours, spark, absent])


def test_every_contestant_links_to_its_documentation_and_names_its_settings() -> None:
    for contestant in list_contestants():
        assert contestant.links, contestant.name
        assert contestant.settings, contestant.name
        assert contestant.claim
        assert contestant.way == ("upsert" if "upsert" in contestant.name else "append")
