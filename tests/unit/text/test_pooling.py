"""What a checkpoint's files say of embeddings, and what is made of a pooled hidden state."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from jswa.errors import CheckpointError, RequestError
from jswa.text.pooling import DEFAULT, PoolingConfig, pairs, similarity
from jswa.text.tokenizer import Tokenizer

KIND = "sentence_transformers.models"
QWEN = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}


def write(folder: Path, modules: Any = None, pooling: Any = None, **config: Any) -> Path:
    """Write a checkpoint's small files, and return its folder."""
    (folder / "config.json").write_text(json.dumps(config))
    if modules is not None:
        listed = [{"idx": n, "name": str(n), "path": "", "type": f"{KIND}.{kind}"} for n, kind in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_a_generative_checkpoint_takes_the_last_token_normalized(tmp_path: Path) -> None:
    assert PoolingConfig.load(write(tmp_path)) == DEFAULT == PoolingConfig("last", True, None, None)


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (["Transformer", "Pooling", "Normalize"], QWEN, PoolingConfig("last", True)),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True}, PoolingConfig("mean", False)),
        (["Transformer", "Pooling"], {"pooling_mode": "lasttoken"}, PoolingConfig("last", False)),
        (["Transformer", "Normalize"], None, PoolingConfig("last", True)),
    ],
)
def test_files_of_sentence_transformers_are_followed(
    modules: list[str], pooling: Any, expected: PoolingConfig, tmp_path: Path
) -> None:
    assert PoolingConfig.load(write(tmp_path, modules, pooling)) == expected


@pytest.mark.parametrize(
    ("modules", "pooling", "named"),
    [
        (["Transformer", "Pooling", "Dense"], QWEN, "'Dense'"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "'cls', and jswa has lasttoken or mean"),
        (["Transformer", "Pooling"], {**QWEN, "pooling_mode_mean_tokens": True}, r"'lasttoken\+mean'"),
        (["Transformer", "Pooling"], {}, "None"),
    ],
)
def test_what_jswa_lacks_is_refused_by_name(modules: list[str], pooling: Any, named: str, tmp_path: Path) -> None:
    """When an embedding is asked for: the checkpoint generates all the same."""
    config = PoolingConfig.load(write(tmp_path, modules, pooling))
    with pytest.raises(RequestError, match=named):
        config.params()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("modules.json", "{}", "must hold a JSON list, not dict"),
        ("modules.json", "[3]", "type = None: must be a string"),
        ("modules.json", json.dumps([{"type": "a"}] * 17), "has 17 modules: must have at most 16"),
        ("modules.json", '[{"type": "x.Pooling"}]', "1_Pooling"),
        ("config.json", '{"is_matryoshka": 1}', "is_matryoshka = 1: must be true or false"),
        ("config.json", '{"matryoshka_dimensions": [0]}', r"matryoshka_dimensions = \[0\]: must be a list"),
        ("config.json", '{"matryoshka_dimensions": []}', r"matryoshka_dimensions = \[\]: must be a list"),
    ],
)
def test_corrupt_files_are_errors(name: str, text: str, message: str, tmp_path: Path) -> None:
    (write(tmp_path) / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        PoolingConfig.load(tmp_path)


def test_dimensions_are_cut_if_the_model_was_trained_for_it(tmp_path: Path) -> None:
    vector = np.array([3.0, 4.0, 12.0, 1.0], np.float32)
    some = PoolingConfig.load(write(tmp_path, matryoshka_dimensions=[2, 3]))
    assert some.params(2).pooling == "last"
    np.testing.assert_allclose(some.embedding(vector, 2), [0.6, 0.8])
    np.testing.assert_array_equal(some.embedding(vector, 2, normalize=False), [3, 4])
    with pytest.raises(RequestError, match="dimensions = 4: must be one of 2, 3"):
        some.params(4)
    every = PoolingConfig.load(write(tmp_path, is_matryoshka=True))
    assert every.params(1).max_tokens == 1
    with pytest.raises(RequestError, match="dimensions = 0: must be at least 1"):
        every.params(0)
    with pytest.raises(RequestError, match="dimensions = 5: must be at most 4"):
        every.embedding(vector, 5)
    with pytest.raises(RequestError, match="dimensions = 2: must be left out"):
        DEFAULT.params(2)


def test_a_vector_of_zeros_stays_zero() -> None:
    zero, one = np.zeros(3, np.float32), np.array([0, 1, 0], np.float32)
    assert not DEFAULT.embedding(zero).any()
    assert similarity(zero, one) == 0
    assert similarity(one, -2 * one) == -1


def test_one_text_is_compared_with_each_or_each_with_its_own() -> None:
    assert pairs(1, 3) == [(0, 0), (0, 1), (0, 2)]
    assert pairs(2, 2) == [(0, 0), (1, 1)]
    for first, second in ((2, 1), (0, 0), (2, 3)):
        with pytest.raises(RequestError, match="must have one text, or as many as text_2"):
            pairs(first, second)


@pytest.mark.parametrize(
    ("most", "first", "last"),
    [(9, "[abcdef]", "[abcdef]"), (5, "[abc]", "[def]"), (3, "[a]", "[f]"), (2, "[a", "f]"), (1, "[", "]")],
)
def test_a_text_is_cut_inside_of_its_special_tokens(most: int, first: str, last: str) -> None:
    """Models of Qwen3-Embedding's kind are pooled at the special token behind the text."""
    names = "abcdef[]"
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: n for n, name in enumerate(names)}, "a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    ends = [("[", names.index("[")), ("]", names.index("]"))]
    backend.post_processor = tokenizers.processors.TemplateProcessing("[ $A ]", None, ends)
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("abcdef")
    for keep_last, expected in ((False, first), (True, last)):
        assert "".join(names[token] for token in tokenizer.cut(ids, most, keep_last=keep_last)) == expected
