"""Reading checkpoints of the published format: every tensor accounted for, every mistake named."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from openvla_golden import TOWERS as VISION_TOWERS
from safetensors.torch import load_file, save_file

from vla_rl.policies.compute import ComputeConfig
from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.checkpoint import CheckpointFiles, compare_shapes, load_weights, resolve_checkpoint_folder
from vla_rl.policies.openvla.loading import load_model, load_openvla, published_norm_stats
from vla_rl.policies.openvla.model import OpenVLAModel
from vla_rl.policies.openvla.preprocessor import check_preprocessor

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = GOLDEN / "openvla_oft_tiny" / "checkpoint"


TEXT = {"model_type": "llama", "vocab_size": 32064}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The published-format checkpoint, with the sizes of its towers, which no timm id says."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(TINY, copy)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_towers": VISION_TOWERS}))
    return copy


def test_the_7b_model_has_exactly_the_published_tensors() -> None:
    config = {
        "model_type": "openvla",
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "use_fused_vision_backbone": True,
        "image_sizes": [224, 224],
        "pad_token_id": 32000,
        "pad_to_multiple_of": 64,
        "n_action_bins": 256,
        "text_config": {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064},
    }
    architecture = Architecture.from_config(config)
    with torch.device("meta"):
        model = OpenVLAModel(architecture)
    manifest = json.loads((GOLDEN / "openvla7b_state_dict_manifest.json").read_text())["model"]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert compare_shapes({name: tuple(shape) for name, shape in manifest.items()}, shapes) == []
    assert sum(weight.numel() for weight in model.parameters()) == 7_541_237_184
    assert architecture.first_action_id == 31744
    assert Architecture.from_config(architecture.to_config()) == architecture


def test_weights_and_side_modules_arrive_in_the_asked_dtype(folder: Path) -> None:
    files = CheckpointFiles.find(folder)
    assert set(files.side_files) == {"action_head", "proprio_projector"}
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("mixed", torch.float32)):
        model = load_model(files, "cpu", ComputeConfig(precision=precision))
        assert {weight.dtype for weight in model.parameters()} == {dtype}
        assert not any(weight.is_meta for weight in model.parameters())
    stored = load_file(folder / "model-00004-of-00004.safetensors")["language_model.lm_head.weight"]
    torch.testing.assert_close(model.language_model.lm_head.weight.detach(), stored.float(), rtol=0, atol=0)
    assert model.proprio_projector is not None
    assert model.proprio_projector.fc1.weight.shape == (32, 8)


def edit_shard(folder: Path, edit) -> None:  # type: ignore[no-untyped-def]
    path = folder / "model-00003-of-00004.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_all_wrong_tensors_are_listed_at_once(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        names = sorted(tensors)
        tensors.pop(names[0])
        tensors[names[1]] = tensors[names[1]][..., :-1].contiguous()
        tensors["language_model.extra"] = torch.zeros(3)

    names = sorted(load_file(folder / "model-00003-of-00004.safetensors"))
    edit_shard(folder, edit)
    with pytest.raises(ValueError, match="do not fit the model") as caught:
        load_model(CheckpointFiles.find(folder), "cpu", ComputeConfig())
    message = str(caught.value)
    assert f"missing: {names[0]} " in message
    assert f"wrong shape: {names[1]} is " in message
    assert "unexpected: language_model.extra [3]" in message


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda f: (f / "config.json").unlink(), "is no OpenVLA checkpoint: it has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "has no weights"),
        (lambda f: (f / "model-00002-of-00004.safetensors").unlink(), "not in the folder: model-00002-of-00004"),
        (lambda f: (f / "model-00002-of-00004.safetensors").write_bytes(b"12345678"), "model-00002.* is damaged"),
        (lambda f: shutil.copy(f / "action_head--100_checkpoint.pt", f / "action_head--200_checkpoint.pt"), "keep one"),
        (lambda f: (f / "action_head--100_checkpoint.pt").write_bytes(b"no zip"), "action_head.* cannot be read"),
        (lambda f: torch.save([1], f / "action_head--100_checkpoint.pt"), "does not hold the tensors of a module"),
        (lambda f: (f / "action_head--100_checkpoint.pt").rename(f / "action_head.pt"), r"head\.pt is not recognised"),
        (lambda f: (f / "config.json").write_text("[1]"), "expected a table of names, found list"),
    ],
)
def test_damaged_folders_are_named(folder: Path, damage, match: str) -> None:  # type: ignore[no-untyped-def]
    damage(folder)
    with pytest.raises(ValueError, match=match):
        load_model(CheckpointFiles.find(folder), "cpu", ComputeConfig())


def test_a_side_file_with_code_in_it_is_not_run(folder: Path) -> None:
    class Bomb:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return (Path.write_text, (folder / "executed", "boom"))

    torch.save({"model.fc1.weight": Bomb()}, folder / "action_head--100_checkpoint.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        load_model(CheckpointFiles.find(folder), "cpu", ComputeConfig())
    assert not (folder / "executed").exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "llama"}, "model_type 'llama'; expected 'openvla'"),
        ({"timm_model_ids": ["clip"]}, "only the fused backbone"),
        ({"image_sizes": [224, 384]}, "expected the same for both towers"),
        ({"text_config": TEXT | {"attention_bias": True}}, "no plain Llama 2: attention_bias True"),
        ({"text_config": TEXT | {"mlp_bias": True}}, "mlp_bias True"),
        ({"text_config": TEXT | {"model_type": "mistral", "sliding_window": 64}}, "model_type 'mistral', sliding_"),
        ({"text_config": TEXT | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}}, "rope_type': 'linear'"),
        ({"pad_to_multiple_of": 32}, "pad_to_multiple_of 32, not 64"),
        ({"pad_token_id": 40000}, "pad_token_id 40000, which is beyond its vocabulary"),
        ({"image_sizes": 224}, "image_sizes 224; expected the same"),
        ({"n_action_bins": 128}, "n_action_bins 128, not 256"),
        ({"image_resize_strategy": "letterbox"}, "image_resize_strategy 'letterbox', not 'resize-naive'"),
        ({"timm_override_act_layers": ["quick_gelu", None]}, "timm_override_act_layers"),
        ({"arch_specifier": "linear"}, "arch_specifier 'linear'"),
    ],
)
def test_other_models_are_refused(change: dict, match: str) -> None:
    config = json.loads((TINY / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=match):
        Architecture.from_config(config)


@pytest.mark.parametrize("name", ["image_sizes", "text_config", "pad_token_id", "pad_to_multiple_of", "n_action_bins"])
def test_an_incomplete_config_is_named(name: str) -> None:
    config = json.loads((TINY / "config.json").read_text())
    config.pop(name)
    with pytest.raises(ValueError, match=rf"config\.json lacks {name}"):
        Architecture.from_config(config)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tvf_do_letterbox": True}, "tvf_do_letterbox True, not False"),
        ({"interpolations": ["bilinear", "bicubic"]}, "interpolations"),
        ({"tvf_crop_params": [{"output_size": [48, 48]}] * 2}, "tvf_crop_params"),
        ({"means": [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]}, "means"),
        ({"input_sizes": [[3, 384, 384], [3, 384, 384]]}, "input_sizes"),
    ],
)
def test_other_images_are_refused(folder: Path, change: dict, match: str) -> None:
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=match):
        check_preprocessor(folder, 56)
    for damage in ("{", "[]"):
        path.write_text(damage)
        with pytest.raises(ValueError, match=r"preprocessor_config\.json is damaged"):
            check_preprocessor(folder, 56)
    path.unlink()
    check_preprocessor(folder, 56)


def test_rope_is_read_where_newer_transformers_write_it() -> None:
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"] |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert Architecture.from_config(config).language.rope_theta == 5e5


def test_a_tensor_in_two_files_is_named(folder: Path) -> None:
    name = "language_model.lm_head.weight"
    stored = load_file(folder / "model-00004-of-00004.safetensors")[name]
    edit_shard(folder, lambda tensors: tensors.update({name: stored}))
    with pytest.raises(ValueError, match=f"doubled: {name}"):
        load_model(CheckpointFiles.find(folder), "cpu", ComputeConfig())


def test_statistics_are_found_by_suite_or_by_key_and_candidates_are_listed(folder: Path) -> None:
    files = CheckpointFiles.find(folder)
    assert published_norm_stats(files, ["libero_tiny"], None).key == "libero_tiny_no_noops"
    assert published_norm_stats(files, ["libero_goal"], "libero_tiny_no_noops").proprio.q01.shape == (8,)
    with pytest.raises(ValueError, match=r"are of libero_tiny_no_noops; looked for 'libero_goal' or 'libero_goal_no_"):
        published_norm_stats(files, ["libero_goal"], None)
    (folder / "dataset_statistics.json").unlink()  # config.json has them, too
    assert published_norm_stats(CheckpointFiles.find(folder), ["libero_tiny"], None).action.mask.tolist()[-1] is False


def test_a_published_folder_needs_to_be_told_its_suite(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"give a configuration with policy\.type=openvla"):
        load_openvla(folder)


def test_a_hub_id_is_looked_up_in_the_local_cache_only(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ValueError, match="hf download someone/openvla-tiny"):
        resolve_checkpoint_folder("someone/openvla-tiny")
    repository = tmp_path / "hub" / "models--someone--openvla-tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    found = resolve_checkpoint_folder("someone/openvla-tiny")
    assert (found / "config.json").is_file()
    assert resolve_checkpoint_folder(str(folder)) == folder
    with pytest.raises(ValueError, match="does not exist"):
        resolve_checkpoint_folder("./nowhere/at_all")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="'runs/stf' does not exist"):  # "runs" is here, so this is no hub id
        resolve_checkpoint_folder("runs/stf")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"does not exist; if it is a hub id: pip install 'vla-rl\[openvla\]'"):
        resolve_checkpoint_folder("someone/openvla-tiny")


def test_tensors_pass_one_by_one(folder: Path) -> None:
    """The next tensor is asked for only when the last one has its place."""
    files, log = CheckpointFiles.find(folder), []
    with torch.device("meta"):
        model = OpenVLAModel(Architecture.from_config(files.config))

    def tensors():  # type: ignore[no-untyped-def]
        for name, tensor in files.tensors("cpu"):
            log.append(sum(not weight.is_meta for weight in model.parameters()))
            yield name, tensor

    load_weights(model, tensors(), torch.float32, "here")
    assert log == list(range(len(log)))
    assert files.shapes() == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert np.isfinite(sum(float(weight.detach().sum()) for weight in model.parameters()))
