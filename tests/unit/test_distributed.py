from __future__ import annotations

import pytest
import torch

from vla_rl.distributed import accumulate_gradients, checked_device, torch_threads


def gradients(num_threads: int) -> tuple[torch.Tensor, list[int]]:
    weights = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    unused = torch.nn.Parameter(torch.zeros(1))

    def part(i: int) -> tuple[torch.Tensor, int]:
        return (weights**i).sum(), i

    parts = [lambda i=i: part(i) for i in (1, 2, 3)]
    results = accumulate_gradients([weights, unused], parts, num_threads)
    assert unused.grad is None
    assert weights.grad is not None
    return weights.grad, results


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_gradients_of_all_parts_add_up(num_threads: int) -> None:
    grad, results = gradients(num_threads)
    # d/dw (w + w^2 + w^3) = 1 + 2 w + 3 w^2: 6 at w = 1, 17 at w = 2.
    assert grad.tolist() == [6.0, 17.0]
    assert results == [1, 2, 3]


def test_gradients_add_to_earlier_ones() -> None:
    weight = torch.nn.Parameter(torch.tensor(3.0))
    for num_threads in (2, 1):
        accumulate_gradients([weight], [lambda: (2 * weight, None)], num_threads)
    assert weight.grad == 4.0


def test_an_error_in_a_part_reaches_the_caller() -> None:
    def broken() -> tuple[torch.Tensor, None]:
        raise FloatingPointError("logprobs: not finite")

    with pytest.raises(FloatingPointError, match="not finite"):
        accumulate_gradients([torch.nn.Parameter(torch.zeros(1))], [broken], 2)


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"device '{name}' cannot be used here.*device=cpu"):
        checked_device(name)
