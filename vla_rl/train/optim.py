"""The optimiser of both trainers: AdamW with gradient clipping, an optional warm-up and an optional decay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from vla_rl.config import ConfigModel

_STEP = 0.1


class OptimConfig(ConfigModel):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101). Defaults are those of SimpleVLA-RL's code."""

    lr: float = Field(default=5e-6, gt=0)
    """Learning rate after the warm-up. SimpleVLA-RL: 5e-6 for a 7-billion-parameter policy; small ones need more."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moment estimates."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay; SimpleVLA-RL's code: 0.01 (the paper does not mention it). It pulls weights to zero."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm; null: never. SimpleVLA-RL: 1. OpenVLA-OFT: null."""
    warmup_updates: int = Field(default=0, ge=0)
    """Optimiser steps over which the rate rises linearly to `lr`. SimpleVLA-RL: 0."""
    decay: Literal["constant", "cosine", "step"] = "constant"
    """After the warm-up: keep the rate (SimpleVLA-RL), half a cosine down to 0 at the end of the run, or a tenth of the
    rate after `decay_after` (OpenVLA-OFT)."""
    decay_after: int | None = Field(default=None, ge=1)
    """Optimiser steps at the full rate, with decay=step. OpenVLA-OFT: 100000."""
    offload: bool = False
    """Keep float32 master weights and AdamW's moments in host memory and compute the step there. The device then holds
    weights and gradients only, and bfloat16 weights do not lose small updates."""

    @model_validator(mode="after")
    def _step_has_a_place(self) -> Self:
        if (self.decay == "step") != (self.decay_after is not None):
            raise ValueError(
                f"decay is {self.decay!r} and decay_after is {self.decay_after}; decay=step needs decay_after, the "
                "others do not use it"
            )
        return self


class Optimizer:
    """AdamW over the trainable parameters of a policy."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: OptimConfig,
        total_updates: int | None = None,
    ) -> None:
        """Own the parameters that require gradients.

        Args:
            named_parameters: E.g. `module.named_parameters()`; the names are for messages.
            config: The settings.
            total_updates: Optimiser steps of the whole run, if known; cosine decay needs it.

        Raises:
            ValueError: No parameter requires gradients, or cosine decay without a known end.
        """
        if config.decay == "cosine" and total_updates is None:
            raise ValueError("optim.decay is 'cosine', but this run has no fixed number of updates; use 'constant'.")
        self._config = config
        self._total_updates = total_updates
        self._named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        if not self._named:
            raise ValueError("no parameter requires gradients: nothing can be trained (is the policy frozen?).")
        self._weights = [weight for _, weight in self._named]
        # What AdamW changes: the policy's own weights, or float32 copies of them in host memory.
        self._masters = [_host_copy(weight) if config.offload else weight for weight in self._weights]
        self._adamw = torch.optim.AdamW(
            self._masters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=config.offload or None,
        )
        self._num_steps = 0

    @property
    def num_steps(self) -> int:
        """Optimiser steps taken."""
        return self._num_steps

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        warmup = self._config.warmup_updates
        if self._num_steps < warmup:
            return self._config.lr * (self._num_steps + 1) / warmup
        if self._config.decay_after is not None:
            return self._config.lr * (_STEP if self._num_steps >= self._config.decay_after else 1.0)
        if self._config.decay == "constant" or self._total_updates is None:
            return self._config.lr
        progress = min(1.0, (self._num_steps - warmup) / max(1, self._total_updates - warmup))
        return self._config.lr * 0.5 * (1 + math.cos(math.pi * progress))

    def step(self) -> float:
        """Clip the accumulated gradient, apply and clear it.

        Returns:
            The global gradient norm before clipping.

        Raises:
            FloatingPointError: The gradient is not finite; names the first parameter. Nothing was applied.
        """
        gradients = [parameter.grad for _, parameter in self._named if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not bool(torch.isfinite(norm)):
            bad = [n for n, p in self._named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
            name = f"the gradient of '{bad[0]}'" if bad else "the global gradient norm"
            raise FloatingPointError(f"{name} is not finite ({len(bad)} parameters); the update was not applied.")
        if self._config.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._weights, self._config.max_grad_norm, norm)
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._apply()
        self._num_steps += 1
        return float(norm)

    def _apply(self) -> None:
        if not self._config.offload:
            self._adamw.step()
            self._adamw.zero_grad(set_to_none=True)
            return
        for master, parameter in zip(self._masters, self._weights, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.to("cpu", torch.float32)
            parameter.grad = None
        self._adamw.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._weights, strict=True):
                if master.grad is not None:
                    parameter.copy_(master)
        self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue bit for bit."""
        state: dict[str, Any] = {"adamw": self._adamw.state_dict(), "num_steps": self._num_steps}
        if self._config.offload:
            state["masters"] = [master.detach() for master in self._masters]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state of the same parameters.

        Raises:
            ValueError: The state was saved with another setting of `offload`.
        """
        if ("masters" in state) != self._config.offload:
            raise ValueError(
                f"the run was saved with optim.offload={'masters' in state} and cannot go on with "
                f"optim.offload={self._config.offload}; use the same setting"
            )
        self._adamw.load_state_dict(state["adamw"])
        self._num_steps = int(state["num_steps"])
        with torch.no_grad():
            for master, saved in zip(self._masters, state.get("masters", ()), strict=False):
                master.copy_(saved)


def _host_copy(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True))
