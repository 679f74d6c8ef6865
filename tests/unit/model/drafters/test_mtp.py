"""The layers for multi-token prediction of MiMo-V2 draft what a reference in float64 drafts."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jswa.errors import CheckpointError, ConfigError
from jswa.model.binding import bind
from jswa.model.drafters.load import check_drafter, load_drafter
from jswa.model.hf.config import load_config, parse_config
from jswa.model.weights.load import load_checkpoint
from tests.parity.drafters.load import drawn_hidden, drawn_text
from tests.parity.load import load_fixture
from tests.parity.weights import write_checkpoint
from tests.support.drafts.dense import Text
from tests.support.drafts.mtp import MtpReference, mtp_tensors

MIMO = load_fixture("mimo_v2_flash_base")


def _checkpoint(folder: Path, layers: int = 3) -> Path:
    write_checkpoint(folder, MIMO.config, MIMO.tensors | mtp_tensors(MIMO.config, layers, seed=5))
    return folder


@pytest.mark.parametrize("broken", [(), (40, 41, 77)])
def test_drafts_are_those_of_the_reference(broken: tuple[int, ...], tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path)
    target, target_params = load_checkpoint(folder, jnp.dtype(jnp.float32))
    drafter, params = load_drafter("mtp", folder, target, target_params, jnp.dtype(jnp.float32))
    tokens, hidden = drawn_text(target.vocab_size, 1), drawn_hidden(target.d_model, 1)
    tensors = MIMO.tensors | mtp_tensors(MIMO.config, 3, seed=5)
    wanted, lead = MtpReference(MIMO.config, tensors, tokens, hidden, broken).drafts()
    assert lead > 1e-4
    states = {len(target.layers): hidden}
    text = Text(drafter, params, target, tokens, states, target=bind(target, target_params), broken=broken)
    assert np.array_equal(text.drafts(3), wanted)
    assert np.array_equal(text.drafts(2), wanted[:, :2])
    assert np.array_equal(text.drafts(4), np.pad(wanted, ((0, 0), (0, 1)), constant_values=-1))


def test_the_layers_are_local_ones_with_the_windows_of_the_target(tmp_path: Path) -> None:
    target = load_config(_checkpoint(tmp_path))
    drafter = check_drafter("mtp", tmp_path, target)
    assert {layer.reach for layer in drafter.layers} == {target.layers[1].attention.reach}
    assert (drafter.most, drafter.taps, drafter.carry) == (3, (len(target.layers),), 3 * target.d_model)


def test_a_checkpoint_without_such_layers_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MIMO.config, MIMO.tensors)
    with pytest.raises(ConfigError, match=r"the checkpoint has no tensors model\.mtp\.layers"):
        check_drafter("mtp", tmp_path, load_config(tmp_path))


def test_another_family_is_refused(tmp_path: Path) -> None:
    llama = load_fixture("llama_gqa").config
    write_checkpoint(tmp_path, MIMO.config, MIMO.tensors)
    with pytest.raises(ConfigError, match="must be another method for llama"):
        check_drafter("mtp", tmp_path, parse_config(llama))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = MIMO.tensors | mtp_tensors(MIMO.config, 3, seed=5)
    del tensors["model.mtp.layers.1.hnorm.weight"]
    write_checkpoint(tmp_path, MIMO.config, tensors)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.hnorm\.weight"):
        check_drafter("mtp", tmp_path, load_config(tmp_path))
