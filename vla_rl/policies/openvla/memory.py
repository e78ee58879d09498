"""What a run needs in GPU and host memory, worked out before anything is allocated.

A GPU holds a whole copy of the model. What is resident (weights, gradients, optimiser state, drawing contexts) is there
all the time; of what comes and goes (the update's activations, the rollout's, the optimiser's) the largest counts, with
a tenth on top for the gaps that an allocator leaves. The formulas of the activations are checked against what autograd
really keeps; the rest is arithmetic on `parameters`. Sizes are in bytes, GB means 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from vla_rl.policies.compute import ComputeConfig, TrainEverything, TrainLora
from vla_rl.policies.openvla import activations
from vla_rl.policies.openvla.activations import FLOAT32, SampleSize, weight_bytes
from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.parameters import model_parameters, side_parameters, trained_parameters

PRESETS_GB = (24, 48, 80, 141)
"""Memory of usual GPUs, e.g. RTX 4090, L40S, A100 or H100, H200."""
PROMPT_TOKENS = 35
"""Of a long LIBERO instruction in OpenVLA's prompt."""
GB = 1e9
_LIBRARIES = 1.0 * GB
"""CUDA context, kernels, cuBLAS workspaces."""
_GAPS = 0.1

Stage = Literal["sft", "train"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that the memory of a run depends on.

    Attributes:
        stage: The verb.
        architecture: Sizes of the model.
        compute: Precision, activation checkpointing, what is trained.
        offload: Whether the optimiser lives in host memory.
        micro_batch_size: Samples per forward and backward pass.
        num_parallel: Such passes at the same time (CPU cores), each with gradients of its own.
        acting_batch_size: Observations per policy call.
        size: Sequence of a sample.
        proprio_dim: Of the projector of proprioception; 0: none.
        l1_action_dim: Of the regression head; 0: none.
        kept_decisions: Decisions whose images stay in host memory until the update.
        demo_steps: Control steps of demonstrations, whose images stay in host memory.
        image_bytes: Raw images of one observation.
        drawing_bytes: Drawing contexts of the simulation.
        draws_on_gpu: Whether these are in the memory of the GPU.
    """

    stage: Stage
    architecture: Architecture
    compute: ComputeConfig
    offload: bool
    micro_batch_size: int
    acting_batch_size: int
    size: SampleSize
    proprio_dim: int = 0
    l1_action_dim: int = 0
    kept_decisions: int = 0
    demo_steps: int = 0
    num_parallel: int = 1
    image_bytes: int = 0
    drawing_bytes: int = 0
    draws_on_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Item:
    """A row of the table.

    Attributes:
        name: What it is.
        size: In bytes.
        note: How it comes about.
    """

    name: str
    size: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What a workload needs.

    Attributes:
        workload: What was estimated.
        resident: In GPU memory all the time.
        transient: In GPU memory one at a time.
        host: In host memory.
        checkpoint: Bytes of one checkpoint on disk.
    """

    workload: Workload
    resident: tuple[Item, ...]
    transient: tuple[Item, ...]
    host: tuple[Item, ...]
    checkpoint: float

    @property
    def total(self) -> float:
        """Bytes per GPU."""
        return sum(item.size for item in self.resident) + (1 + _GAPS) * self.peak.size

    @property
    def peak(self) -> Item:
        """The largest of what comes and goes."""
        return max(self.transient, key=lambda item: item.size)

    @property
    def host_total(self) -> float:
        """Bytes of host memory, besides the simulation and the libraries."""
        return sum(item.size for item in self.host)

    @property
    def smallest_preset(self) -> int | None:
        """The smallest usual GPU that is large enough, in GB; None: there is none."""
        return next((size for size in PRESETS_GB if self.fits(size)), None)

    def fits(self, gpu_gb: float) -> bool:
        """Whether a GPU with this much memory is enough."""
        return self.total <= gpu_gb * GB

    def require_fits(self, gpu_gb: float) -> None:
        """Refuse a GPU that is too small.

        Raises:
            ValueError: Names the largest items, and settings that need less with what they need.
        """
        if self.fits(gpu_gb):
            return
        largest = sorted((*self.resident, self.peak), key=lambda item: -item.size)[:3]
        totals = [(text, estimate(smaller).total) for text, smaller in _smaller(self.workload)]
        changes = [f"\n  {text}: {total / GB:.1f} GB" for text, total in totals if total < 0.99 * self.total]
        raise ValueError(
            f"{self.workload.stage} needs about {self.total / GB:.1f} GB of GPU memory and there are {gpu_gb:g} GB; "
            "the largest items are "
            + ", ".join(f"{item.name} ({item.size / GB:.1f} GB)" for item in largest)
            + (". Each of these alone would make it" + "".join(changes) if changes else "; use a larger GPU")
        )

    def table(self) -> str:
        """One line per item, sums, and which usual GPUs are large enough."""
        lines = [f"GPU memory of {self.workload.stage}, in GB (each GPU holds a whole copy)"]
        lines += [_row(item, "") for item in self.resident]
        lines += [_row(item, "*" if item is self.peak else "-") for item in self.transient]
        lines.append(_row(Item(name="gaps", size=_GAPS * self.peak.size, note=f"{_GAPS:.0%} of *"), ""))
        lines.append(_row(Item(name="total", size=self.total, note="of * and - only the largest counts"), "="))
        lines.append("  enough: " + ", ".join(f"{size} GB {'yes' if self.fits(size) else 'no'}" for size in PRESETS_GB))
        lines.append("Host memory, in GB (besides the simulation's models)")
        lines += [_row(item, "") for item in self.host]
        lines.append(_row(Item(name="total", size=self.host_total), "="))
        lines.append(f"A checkpoint takes {self.checkpoint / GB:.2f} GB on disk")
        return "\n".join(lines)


def check_compute(compute: ComputeConfig, *, offload: bool, section: str) -> None:
    """Refuse combinations that would run and not learn.

    Args:
        compute: Precision and what is trained.
        offload: Whether the optimiser keeps float32 weights in host memory.
        section: Name of the optimiser's settings, for the message.

    Raises:
        ValueError: Updates would be lost, or a setting has no effect.
    """
    trains_everything = isinstance(compute.trained, TrainEverything)
    if compute.precision == "bfloat16" and trains_everything and not offload:
        raise ValueError(
            "compute.precision is bfloat16, compute.trained.type is full and the optimiser has no float32 weights: a "
            "bfloat16 weight changes in steps of 0.4 % of its size, smaller updates (nearly all at a rate of 5e-6) are "
            f"lost. Set {section}.offload=true, or compute.trained.type=lora, or compute.precision=mixed"
        )
    if compute.vision_cache_gb > 0 and _trains_vision(compute):
        raise ValueError(
            "compute.vision_cache_gb keeps features of frozen vision towers, but these are trained; set it to 0, or "
            "compute.trained.freeze_vision=true, or compute.trained.targets=language"
        )


def estimate(workload: Workload) -> MemoryEstimate:
    """What a workload needs."""
    architecture, compute, on_device = workload.architecture, workload.compute, not workload.offload
    side = side_parameters(architecture, workload.proprio_dim, workload.l1_action_dim)
    num_weights = model_parameters(architecture) + side
    num_adapted = trained_parameters(architecture, compute.trained)
    is_lora = isinstance(compute.trained, TrainLora)
    per_weight = weight_bytes(compute)
    num_trained = num_adapted + side
    trained_size = num_trained * (FLOAT32 if is_lora else per_weight)  # adapters and what is trained beside them
    weights = num_weights * per_weight + (num_adapted * FLOAT32 + side * (FLOAT32 - per_weight) if is_lora else 0)
    moments = num_trained * 2 * FLOAT32 if workload.offload else 2 * trained_size
    masters = num_trained * FLOAT32 if workload.offload else 0
    resident = [
        Item(name="weights", size=weights, note=f"{num_weights:,} parameters, {per_weight} bytes each"),
        Item(name="gradients", size=trained_size, note=f"of {num_trained:,} parameters"),
        Item(name="optimiser", size=moments if on_device else 0, note="two moments" if on_device else "offloaded"),
    ]
    if workload.draws_on_gpu and workload.drawing_bytes:
        resident.append(Item(name="drawing contexts", size=workload.drawing_bytes, note="one per thread and task"))
    resident.append(Item(name="libraries", size=_LIBRARIES, note="CUDA context, kernels, workspaces"))
    return MemoryEstimate(
        workload=workload,
        resident=tuple(resident),
        transient=(_update(workload, trained_size), _acting(workload), _step(workload, trained_size)),
        host=tuple(_host(workload, num_trained)),
        checkpoint=weights + moments + masters,
    )


def _update(workload: Workload, trained_size: float) -> Item:
    """Activations and logits of a micro-batch, and gradients that are not yet added up."""
    architecture, compute, size = workload.architecture, workload.compute, workload.size
    logits = activations.vocabulary_logit_bytes if workload.stage == "sft" else activations.bin_logit_bytes
    per_sample = (
        activations.update_bytes(architecture, compute, size)
        + activations.one_layer_bytes(architecture, compute, size)
        + (0 if workload.l1_action_dim else logits(architecture, size))
    )
    batch = workload.micro_batch_size
    note = f"{batch} samples of {size.length(architecture)} tokens, {per_sample / 1e6:.0f} MB each"
    one_pass = batch * per_sample + activations.embedding_gradient_bytes(architecture, compute) + _copies(workload)
    if workload.num_parallel > 1:
        note = f"{workload.num_parallel} x {note}, and gradients"
        one_pass += trained_size
    return Item(
        name="update",
        size=workload.num_parallel * one_pass,
        note=note + (", recomputed layer by layer" if compute.activation_checkpointing else ""),
    )


def _acting(workload: Workload) -> Item:
    batch = workload.acting_batch_size
    per_observation = activations.acting_bytes(workload.architecture, workload.compute, workload.size)
    return Item(name="acting", size=batch * per_observation + _copies(workload), note=f"{batch} observations per call")


def _step(workload: Workload, trained_size: int) -> Item:
    if workload.offload:
        return Item(name="optimiser step", size=0.0, note="computed on the host")
    return Item(name="optimiser step", size=trained_size, note="one intermediate of all trained weights")


def _copies(workload: Workload) -> float:
    """Mixed precision keeps bfloat16 copies of the weights during a pass."""
    is_mixed = workload.compute.precision == "mixed"
    return activations.BFLOAT16 * model_parameters(workload.architecture) if is_mixed else 0.0


def _host(workload: Workload, num_trained: int) -> Iterator[Item]:
    if workload.offload:
        yield Item(name="float32 weights", size=num_trained * FLOAT32, note="what the optimiser changes")
        yield Item(name="moments", size=num_trained * 2 * FLOAT32)
        yield Item(name="gradients", size=num_trained * FLOAT32, note="during the optimiser step")
    if workload.kept_decisions:
        size = workload.image_bytes + 3 * workload.size.num_images * workload.architecture.image_size**2  # as prepared
        note = f"at most {workload.kept_decisions:,} decisions of {size / 1e3:.0f} kB until the update"
        yield Item(name="images", size=workload.kept_decisions * size, note=note)
    if workload.demo_steps:
        note = f"at most {workload.demo_steps:,} control steps of {workload.image_bytes / 1e3:.0f} kB"
        yield Item(name="demonstrations", size=workload.demo_steps * workload.image_bytes, note=note)
    if workload.compute.vision_cache_gb > 0:
        features = activations.feature_bytes(workload.architecture, workload.compute, workload.size.num_images)
        needed = workload.kept_decisions * features
        note = f"{needed / GB:.1f} GB would hold all, {features / 1e6:.1f} MB each"
        yield Item(name="vision cache", size=min(workload.compute.vision_cache_gb * GB, needed), note=note)
    if workload.drawing_bytes and not workload.draws_on_gpu:
        yield Item(name="drawing contexts", size=workload.drawing_bytes, note="one per thread and task")


def _smaller(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Single changes that need less, as overrides."""
    compute = workload.compute
    optim = "sft.optim" if workload.stage == "sft" else "rl.optim"
    micro_batch = "sft.micro_batch_size" if workload.stage == "sft" else "rl.algo.micro_batch_size"

    def changed(**values: object) -> Workload:
        return replace(workload, compute=compute.model_copy(update=values))

    if not compute.activation_checkpointing:
        yield "compute.activation_checkpointing=true", changed(activation_checkpointing=True)
    if workload.micro_batch_size > 1:
        size = max(1, workload.micro_batch_size // 4)
        yield f"{micro_batch}={size}", replace(workload, micro_batch_size=size)
    if isinstance(compute.trained, TrainEverything):
        yield "compute.trained.type=lora", changed(trained=TrainLora())
    if not workload.offload:
        yield f"{optim}.offload=true", replace(workload, offload=True)
    if compute.precision != "bfloat16":
        is_safe = workload.offload or isinstance(compute.trained, TrainLora)
        words = "compute.precision=bfloat16" + ("" if is_safe else f" {optim}.offload=true")
        yield words, replace(changed(precision="bfloat16"), offload=workload.offload or not is_safe)
    if workload.draws_on_gpu and workload.drawing_bytes > GB:
        yield "half of rollout.num_threads", replace(workload, drawing_bytes=workload.drawing_bytes // 2)


def _trains_vision(compute: ComputeConfig) -> bool:
    trained = compute.trained
    return trained.targets in ("published", "existing") if isinstance(trained, TrainLora) else not trained.freeze_vision


def _row(item: Item, mark: str) -> str:
    return f"  {mark:1} {item.name:17}{item.size / GB:8.2f}  {item.note}".rstrip()
