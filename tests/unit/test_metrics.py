"""Metrics of a run: durable rows, resuming, refused values, what TensorBoard reads, and stopwatches."""

import itertools
import json
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vla_rl.metrics import MetricsWriter, Timings, read_metrics


def write(folder: Path, iterations: range, first_iteration: int = 0, offset: float = 0.0) -> None:
    with MetricsWriter(folder, first_iteration) as writer:
        for iteration in iterations:
            writer.write(iteration, {"update/loss": iteration + offset})


def test_one_json_object_per_iteration(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"iteration": i, "update/loss": float(i)} for i in range(3)]
    assert read_metrics(tmp_path) == [json.loads(line) for line in lines]


def test_rows_are_on_disk_before_close(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": 1})
        assert read_metrics(tmp_path) == [{"iteration": 0, "a": 1.0}]
    writer.close()


def test_resuming_replaces_later_rows_and_a_torn_one(tmp_path: Path) -> None:
    write(tmp_path, range(5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "update/lo')
    write(tmp_path, range(3, 5), first_iteration=3, offset=0.5)
    assert [row["update/loss"] for row in read_metrics(tmp_path)] == [0.0, 1.0, 2.0, 3.5, 4.5]


def test_a_torn_row_is_removed_even_if_it_is_the_only_damage(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2')
    write(tmp_path, range(2, 3), first_iteration=2)
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [0, 1, 2]


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\nnonsense\n{"iteration": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl', line 2 is not a row of metrics"):
        MetricsWriter(tmp_path, first_iteration=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named_and_not_written(tmp_path: Path, value: float) -> None:
    with (
        MetricsWriter(tmp_path) as writer,
        pytest.raises(FloatingPointError, match=r"iteration 7 .*update/grad_norm=(nan|-?inf)\."),
    ):
        writer.write(7, {"update/loss": 1.0, "update/grad_norm": value})
    assert read_metrics(tmp_path) == []


def test_tensorboard_reads_the_resumed_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # TensorBoard reads event files in the order of the second in their names.
    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    write(tmp_path, range(4))
    write(tmp_path, range(2, 4), first_iteration=2, offset=10.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("update/loss")] == [(0, 0), (1, 1), (2, 12), (3, 13)]


def test_timings_add_up_and_start_again() -> None:
    timings = Timings()
    timings.add("physics", 0.5)
    timings.add("physics", 0.25)
    with pytest.raises(ValueError, match="stop"), timings.measure("update"):
        raise ValueError("stop")
    taken = timings.take()
    assert taken["time/physics_s"] == 0.75
    assert taken["time/update_s"] >= 0
    assert timings.take() == {}
