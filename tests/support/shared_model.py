"""A program with eight CPU devices, which other tests must not see: runs a tiny model on 1 to 8 of them.

    python -m tests.support.shared_model FOLDER NAME DEVICES…
    python -m tests.support.shared_model FOLDER NAME placed

A name is a family, or a family and a form, as in llama+lora. The program writes a random checkpoint below FOLDER, runs
the same requests on an engine for each number of devices, and prints the results as JSON; or it checks which part of
each parameter a device has. Run by test_tensor_parallel.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from jswa.errors import CacheFileError
from jswa.exec.mesh import make_mesh
from jswa.llm import LLM
from jswa.model.hf.config import parse_config
from jswa.model.hf.tensor_map import sources
from jswa.model.partition import cut_of
from jswa.model.transformer import Params
from jswa.model.weights.load import dummy_checkpoint, load_checkpoint
from jswa.model.weights.lora.files import room_bytes
from jswa.model.weights.placement import Placement
from jswa.options.lora import LoraRoom
from jswa.running.assembly import put_whole
from jswa.running.staging import WeightsStager, held_shapes
from jswa.storage.convert import convert
from tests.e2e.model.test_kv_scales import grown
from tests.parity.case import F, S
from tests.parity.load import read_config
from tests.parity.weights import random_weights, write_checkpoint
from tests.support.checkpoints import float4
from tests.support.checkpoints.adapters import DENSE, random_lora
from tests.support.checkpoints.expert_adapters import random_expert_lora, write_fused
from tests.support.checkpoints.packed_integers import Case, held_numbers, pack_model
from tests.support.checkpoints.quantized import experts_in_blocks, mxfp4, write
from tests.support.checkpoints.sharded_tiles import check_blocks, check_fp8, check_tiles
from tests.support.commands.leaving import leave
from tests.support.drafts.drawn import Drawn
from tests.support.oracles import quick_compiles
from tools.aot.measures.programs import collectives

C = "chunked_attention"
# Changes to the fixture of that name: eight query heads, few layers, and sizes that are multiples of eight.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama_gqa", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "gemma3": ("gemma3_text_p6", {"num_key_value_heads": 8, "num_hidden_layers": 3, "layer_types": [S, S, F]}),
    "gpt_oss": ("gpt_oss_base", {"num_local_experts": 8}),
    "mimo_v2_flash": (
        "mimo_v2_flash_base",
        {
            "num_key_value_heads": 2,
            "swa_num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "layer_types": [F, S, S],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "llama4": (
        "llama4_text_base",
        {"num_local_experts": 8, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "moe_layers": [0, 2]}
        | {"layer_types": [C, F, C]},
    ),
    "gemma4": (
        "gemma4_text_mix",
        {"per_layer_config": {layer: {"head_dim": 32, "num_key_value_heads": 2} for layer in ("2", "5")}},
    ),
    "iquest_q1": ("iquest_q1_base", {"num_key_value_heads": 4}),
    "rnj1": ("rnj1_base", {"num_key_value_heads": 4, "num_hidden_layers": 3, "layer_types": [C, F, C]}),
}
DRAFTS = {"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
# Options of the engine by form.
FORMS: dict[str, dict[str, Any]] = {
    "": {},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "blocks": {"quantization": "fp8", "kernels": "experts=xla,sampling=xla"},
    **{form: {} for form in ("mxfp4", "int4", "order", "nvfp4", "lora", "experts")},
    "room": {"max_loras": 2, "max_lora_rank": 5},
    "kv": {"kv_cache_dtype": "fp8"},
    "drafts": {"speculative_config": DRAFTS},
}
CONTEXT_HEADS = 2  # KV heads of models whose full layers' tokens devices share
# Packed integers by form. 32 inputs share a scale, also where devices have 8 or 16 of them.
PACKED = {"int4": Case("compressed"), "order": Case("gptq", act_order=True)}
OPTIONS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "kv_cache_memory_bytes": 1 << 21,
    "deterministic": True,  # one program, as XLA adds up what draws need
    "kernels": "sampling=xla",
}
ASKED: dict[str, Any] = {"ignore_eos": True, "use_tqdm": False}


def form_of(name: str) -> str:
    """Return the form in a name. Before it may be the word context: then devices share the tokens of full layers."""
    return name.partition("+")[2].removeprefix("context").removeprefix("_")


def checkpoint(name: str, folder: Path) -> tuple[Path, int]:
    """Write the checkpoint; return its folder and the size of its vocabulary."""
    family, form = name.partition("+")[0], form_of(name)
    fixture, changes = MODELS[family]
    raw = read_config(fixture) | {"num_attention_heads": 8} | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    if form == "mxfp4":
        raw["intermediate_size"] = 64
    if "+context" in name:
        raw["num_key_value_heads"] = CONTEXT_HEADS
    model = parse_config(raw)
    shapes = {part.key: part.shape for source in sources(model).values() for part in source.parts}
    means = {key: 1.0 for key in shapes if "norm" in key and "gemma" not in name}
    tensors, where = random_weights(shapes, means, 3), folder / name
    if form == "kv":
        tensors = grown(model, tensors)
    if form in PACKED:
        packed_tensors, method = pack_model(PACKED[form], tensors)
        write(where, {**raw, "quantization_config": method}, packed_tensors)
        return where, raw["vocab_size"]
    if form == "nvfp4":
        write(where, {**raw, "quantization_config": float4.CONFIGS["modelopt"]}, float4.pack_model(tensors))
        return where, raw["vocab_size"]
    if form == "blocks":
        method = {"quant_method": "fp8", "weight_block_size": [16, 16]}
        write(where, {**raw, "quantization_config": method}, experts_in_blocks(tensors, (16, 16)))
        return where, raw["vocab_size"]
    if form == "mxfp4":
        write(where, {**raw, "quantization_config": {"quant_method": "mxfp4"}}, packed(tensors))
        return where, raw["vocab_size"]
    write_checkpoint(where, raw, tensors)
    if form in ("lora", "room"):
        random_lora(tensors, DENSE, 4, 7).write(where / "adapter")
        random_lora(tensors, DENSE, 5, 8).write(where / "other")
    if form == "experts":
        write_fused(where / "adapter", random_expert_lora(tensors, 4, 7))
    return where, raw["vocab_size"]


def packed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace the experts by random ones in MXFP4."""
    rng, out = np.random.default_rng(11), {}
    for key, tensor in tensors.items():
        if tensor.ndim == 3:
            experts, inner, outer = tensor.shape
            blocks, scales, _ = mxfp4(rng, (experts, outer, inner))
            out[f"{key}_blocks"] = blocks.reshape(*scales.shape, -1)
            out[f"{key}_scales"] = scales
        else:
            out[key] = tensor
    return out


def load(model: Path, devices: int, **more: Any) -> LLM:
    """Return an LLM of a checkpoint, with the options of the form in its name."""
    form = form_of(model.name)
    adapters = {"lora_modules": {"one": model / "adapter"}} if form in ("lora", "experts") else {}
    if "+context" in model.name:
        more["decode_context_parallel_size"] = max(1, devices // CONTEXT_HEADS)
    llm = LLM(model, tensor_parallel_size=devices, **adapters, **{**OPTIONS, **FORMS[form]}, **more)
    if form == "room":
        load_and_unload(llm, model)
    scheduler = llm.engine.scheduler
    if scheduler.limits.speculation is not None:
        scheduler.drafting.choice = Drawn(random.Random(1), scheduler.rows.max_rows)
    return llm


def load_and_unload(llm: LLM, model: Path) -> None:
    """Load the adapter into the slot of another one, which has been unloaded."""
    for name in ("other", "third"):
        llm.load_lora(name, model / "other")
    llm.unload_lora("third")
    llm.load_lora("one", model / "adapter")
    llm.unload_lora("other")


def ask(llm: LLM, vocab: int) -> dict[str, Any]:
    """Return texts of a cold run, of cached prefixes and of rebuilt windows; prompt log probabilities; and samples."""
    asked = {**ASKED, "lora": next(iter(llm.engine.adapters), None)}
    text = np.random.default_rng(5).integers(3, vocab, 60).tolist()
    prompts = [text[:40], text[:23] + text[30:37], text[7:20]]
    turns: list[Any] = []
    for turn in ("cold", "cached", "revived"):
        if turn == "revived":
            lose_windows(llm)
        outputs = llm.generate(prompts, temperature=0, max_tokens=10, logprobs=2, **asked)
        turns.append([greedy(output) for output in outputs])
    stats = llm.cache_stats()
    scored = llm.generate(text, temperature=0, max_tokens=1, prompt_logprobs=1, **asked)[0].prompt_logprobs
    assert scored is not None
    pooled = llm.generate(text, max_tokens=1, pooling="last", **asked)[0].pooled
    assert pooled is not None
    drawn = [
        list(llm.generate(text[:n], max_tokens=8, seed=n, **asked, **given)[0].outputs[0].token_ids)
        for n, given in (
            (20, {"temperature": 1.0}),
            (21, {"temperature": 1.0, "top_k": 7}),
            (22, {"temperature": 1.5, "top_p": 0.7}),
            (23, {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05}),
            (24, {"temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3}),
            (25, {"temperature": 0, "logit_bias": {5: -100.0, 77: 4.0}}),
            (26, {"temperature": 1.0, "allowed_token_ids": [4, 11, 13, 50, 95]}),
        )
    ]
    return {
        "turns": turns,
        "cached": stats.cached_tokens,
        "revived": stats.revived_tokens,
        "prompt": [[one[t].logprob for t in sorted(one)] for one in scored if one is not None],
        "pooled": pooled.tolist(),
        "drawn": drawn,
    }


def greedy(output: Any) -> list[list[float]]:
    """Return for each token: its id, its log probability, and its margin over the second most likely token."""
    (found,) = output.outputs
    rows = []
    for token, table in zip(found.token_ids, found.logprobs, strict=True):
        best = sorted((one.logprob for one in table.values()), reverse=True)
        rows.append([token, table[token].logprob, best[0] - best[1]])
    return rows


def lose_windows(llm: LLM) -> None:
    """Evict all local KV from the cache, if the model has full layers that keep the texts."""
    if llm.engine.layout.full is not None:
        llm.engine.scheduler.cache.prefix.retention.drop_windows()


def saved(llm: LLM, folder: Path, devices: int) -> dict[str, Any]:
    """Save the cache, load it into the empty one, and try to load the one that another number of devices saved."""
    lora = next(iter(llm.engine.adapters), None)
    texts = llm.save_cache(folder / f"cache {devices}", lora=lora)
    llm.flush_cache()
    loaded = llm.load_cache(folder / f"cache {devices}", lora=lora)
    refused = ""
    if devices > 1:
        try:
            llm.load_cache(folder / "cache 1", lora=lora)
        except CacheFileError as error:
            refused = str(error)
    return {"saved": texts, "loaded": loaded, "refused": refused}


def check_placed(folder: Path, name: str, devices: int) -> None:
    """Assert that each device has its part of every parameter, bit for bit, also of rounded and converted ones."""
    source, _ = checkpoint(name, folder)
    mesh, float32 = make_mesh(devices), jnp.dtype("float32")
    if form_of(name) in PACKED:
        convert(source, folder / "converted", "float32")
        check_int4(source, mesh)
        check_int4(folder / "converted", mesh, source)
        return
    convert(source, folder / "converted", "float32", "int8")
    for where, mode in ((source, "none"), (source, "int8"), (source, "fp8"), (folder / "converted", "auto")):
        quantization: Any = mode
        model, whole = load_checkpoint(where, float32, quantization=quantization)
        _, shared = load_checkpoint(where, float32, quantization=quantization, mesh=mesh)
        _, random = dummy_checkpoint(where, float32, 0, quantization=quantization, mesh=mesh)
        assert shared.keys() == whole.keys()
        for key, value in whole.items():
            cut = cut_of(key, value.shape, model, devices)
            assert mode == "auto" or random[key].shape == shared[key].shape
            assert random.get(key, shared[key]).sharding == shared[key].sharding
            for number, part in enumerate(Placement(model, mesh).shards(shared[key])):
                expected = np.asarray(value)
                if cut is not None:
                    runs = [np.take(expected, range(*run), axis=cut.axis) for run in cut.ranges[number]]
                    expected = np.concatenate(runs, axis=cut.axis) if runs else np.zeros_like(expected)
                assert np.array_equal(np.asarray(part), expected), f"{key} on device {number}"
        if mode == "fp8" and name == "llama":
            check_tiles()
            check_blocks(folder)
            check_fp8(load_checkpoint(where, float32, quantization="fp8", mesh=make_mesh(2))[1])
        if mode == "none":
            check_staged(
                source,
                WeightsStager(model, float32, Placement(model, mesh), held_shapes(shared), "none", "xla", "xla", False),
                shared,
            )


def check_staged(source: Path, stager: WeightsStager, shared: Params) -> None:
    """Assert that each device gets the same part of weights that come as arrays, or in a trainer's own shards."""
    arrays = load_file(source / "model.safetensors")
    assert_same_parts(stager.stage(arrays), shared)
    mesh = stager.placement.mesh
    if mesh is None:
        return
    whole = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    own = Mesh(np.array(mesh.devices.flat).reshape(-1, 1), ("fsdp", "other"))
    for name, array in arrays.items():
        spec = PartitionSpec("fsdp" if len(array) % mesh.size == 0 else None)  # type: ignore[no-untyped-call]
        arrays[name] = jax.device_put(array, NamedSharding(own, spec))
        with jax.transfer_guard("disallow_explicit"):
            assert np.array_equal(put_whole(arrays[name], whole).addressable_shards[-1].data, array)
    assert_same_parts(stager.stage(arrays), shared)


def assert_same_parts(staged: Params, shared: Params) -> None:
    """Assert that each device has the same part of all parameters."""
    for key, value in shared.items():
        assert staged[key].sharding == value.sharding
        for one, other in zip(staged[key].addressable_shards, value.addressable_shards, strict=True):
            assert one.device == other.device
            assert np.array_equal(np.asarray(one.data), np.asarray(other.data)), f"{key} as new weights"


def check_int4(folder: Path, mesh: Any, source: Path | None = None) -> None:
    """Assert that the matrices in 4 bits of each device have the numbers of its part."""
    model, whole = load_checkpoint(source or folder, jnp.dtype("float32"), quantization="none")
    _, shared = load_checkpoint(folder, jnp.dtype("float32"), quantization="auto", mesh=mesh)
    names = [key.removesuffix(".codes") for key in shared if key.endswith(".codes")]
    assert len(names) == 4 * len(model.layers)
    for name in names:
        fields = [f"{name}.{field}" for field in ("codes", "group_scales", "group_zeros", "group_of")]
        shards = [Placement(model, mesh).shards(shared[field]) if field in shared else None for field in fields]
        cut = cut_of(name, whole[name].shape, model, mesh.size)
        assert cut is not None
        for number in range(mesh.size):
            codes, scales, zeros, table = (None if one is None else np.asarray(one[number]) for one in shards)
            assert codes is not None
            assert scales is not None
            assert zeros is not None
            runs = [np.take(np.asarray(whole[name]), range(*run), axis=cut.axis) for run in cut.ranges[number]]
            found = held_numbers(codes, scales, zeros, table)
            assert np.array_equal(found, np.concatenate(runs, axis=cut.axis)), f"{name} on device {number}"


def main(folder: Path, name: str, counts: list[int]) -> None:
    """Run an engine on each number of devices, and print a JSON object by that number."""
    found = {}
    model, vocab = checkpoint(name, folder)
    for devices in counts:
        with quick_compiles():
            llm = load(model, devices)
            facts = ask(llm, vocab)
        runner: Any = llm.engine.runner
        held = {name: value.addressable_shards[0].data.nbytes for name, value in runner.params.items()}
        if name.endswith("+room"):
            room = sum(size for key, size in held.items() if ".lora_" in key)
            assert room == room_bytes(llm.engine.model, LoraRoom(2, 5), 4, devices)
        # A deterministic engine runs in halves: the sums of the layers are in the first.
        program = next(runner.compiled[n] for n, config in enumerate(runner.configs) if config.part == "forward")
        found[devices] = {
            **facts,
            **saved(llm, folder, devices),
            "parameters": sum(held.values()),
            "page": llm.engine.layout.slab_bytes(4) / llm.engine.layout.pages_per_slab,
            "lane": [list(runner.state["lanes"][0].shape), len(runner.state["lanes"][0].devices())],
            "layers": len(llm.engine.model.layers),
            "kinds": [layer.attention.kind for layer in llm.engine.model.layers],
            "collectives": collectives(program.as_text()),
        }
        llm.close()
    print(json.dumps(found))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # type: ignore[no-untyped-call]
    if sys.argv[3:] == ["placed"]:
        check_placed(Path(sys.argv[1]), sys.argv[2], 8)
    else:
        main(Path(sys.argv[1]), sys.argv[2], [int(number) for number in sys.argv[3:]])
    leave()
