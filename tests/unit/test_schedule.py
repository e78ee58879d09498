"""The control loop's schedule on a made-up clock."""

from __future__ import annotations

import pytest

from robots.schedule import Schedule


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_late_ticks_do_not_shift_the_ones_after() -> None:
    clock = Clock()
    schedule = Schedule(0.05, clock, clock.sleep)
    begins = []
    for work in (0.01, 0.06, 0.01, 0.01):  # the second one overruns
        begins.append((schedule.begin_tick(), clock.now))
        clock.now += work
        schedule.end_tick()
    assert [due for due, _ in begins] == pytest.approx([100.0, 100.05, 100.10, 100.15])
    assert [now for _, now in begins] == pytest.approx([100.0, 100.05, 100.11, 100.15])
    report = schedule.report()
    assert (report.num_ticks, report.overruns, report.skipped) == (4, 1, 0)
    assert report.period_max_ms == pytest.approx(60.0)


def test_whole_periods_that_were_missed_are_skipped_and_counted() -> None:
    clock = Clock()
    schedule = Schedule(0.05, clock, clock.sleep)
    schedule.begin_tick()
    clock.now += 0.18  # the ticks at 0.05 and 0.10 are gone, the one at 0.15 is late
    schedule.end_tick()
    assert schedule.begin_tick() == pytest.approx(100.15)
    assert schedule.begin_tick() == pytest.approx(100.20)
    assert (schedule.report().skipped, schedule.report().overruns) == (2, 1)


def test_lockstep_never_waits() -> None:
    clock = Clock()
    schedule = Schedule(0.0, clock, clock.sleep)
    for _ in range(3):
        schedule.begin_tick()
        clock.now += 7.0
        schedule.end_tick()
    assert schedule.report().overruns == 0


def test_the_next_answer_is_expected_like_the_slowest_of_the_last() -> None:
    schedule = Schedule(0.05)
    assert schedule.expected_inference_s() == 0.0
    for seconds in (0.9, *[0.1] * 9, 0.2):
        schedule.note_inference(seconds)
    assert schedule.expected_inference_s() == pytest.approx(0.2)
    assert schedule.report().inference_max_ms == pytest.approx(900.0)
    assert "starved" in str(schedule.report())
