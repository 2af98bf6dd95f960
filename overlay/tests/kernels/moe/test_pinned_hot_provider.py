# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`pinned_hot` on real layers: start-up checks, exactness, reload."""

import copy
import gc
from dataclasses import replace

import pytest
import torch

from tests.kernels.moe.expert_provider_utils import (
    HIDDEN,
    INTERMEDIATE,
    LAYER_NAMES,
    NUM_EXPERTS,
    build_layer,
    engine_config,
    run,
    single_rank,
    write_model,
)
from tests.kernels.moe.pinned_hot_utils import (
    COUNTS,
    load_weights,
    make_map,
    pages_in_memory,
    write_map,
)
from vllm.model_executor.layers.fused_moe.expert_weight_provider import (
    ResidentProvider,
)
from vllm.model_executor.layers.fused_moe.pinned_hot import device_range
from vllm.model_executor.layers.fused_moe.pinned_hot import provider as provider_module
from vllm.model_executor.layers.fused_moe.pinned_hot import tensors as tensors_module
from vllm.model_executor.layers.fused_moe.pinned_hot.device_backing import (
    DeviceBacking,
)
from vllm.model_executor.layers.fused_moe.pinned_hot.file_backing import FileBacking
from vllm.model_executor.layers.fused_moe.pinned_hot.map_file import rank_experts
from vllm.model_executor.layers.fused_moe.pinned_hot.provider import (
    PinnedHotProvider,
)
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.expert_weights import (
    attach_expert_weights,
    bind_expert_providers,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="the file backing serves the CPU backend"
)

DTYPES = (torch.float32, torch.bfloat16)
TOKENS = (1, 2, 17, 128)
HOT = (0, 1, 3, 4, NUM_EXPERTS - 1, NUM_EXPERTS)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def pinned_config(tmp_path, hot=3, model_changes=None, map_changes=None, **kwargs):
    model = write_model(tmp_path / "model", **(model_changes or {}))
    path = write_map(tmp_path / f"map{hot}.json", hot, **(map_changes or {}))
    options = {"expert_provider": "pinned_hot", "expert_map": str(path)}
    options["expert_cold_dir"] = str(tmp_path)
    return engine_config(model, **(options | kwargs))


@pytest.fixture(autouse=True)
def fresh_maps():
    provider_module._read_map.cache_clear()


def load(config, dtype, **kwargs):
    """Take the layers of a model through the loader's steps."""
    layers = [build_layer(name, dtype, **kwargs) for name in LAYER_NAMES]
    model = torch.nn.ModuleList(layers)
    bind_expert_providers(model, config, config.model_config)
    for index, layer in enumerate(layers):
        load_weights(layer, seed=index)
    return layers


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hot", HOT)
def test_layer_is_bit_identical(tmp_path, hot, dtype, has_bias):
    name = str(dtype).removeprefix("torch.")
    activation = "swigluoai" if has_bias else "silu"
    stock = engine_config(write_model(tmp_path / "model"), dtype=name)
    with single_rank(stock, tmp_path):
        reference = load(stock, dtype, has_bias=has_bias, activation=activation)
        expected = [[run(layer, m) for m in TOKENS] for layer in reference]
    config = pinned_config(tmp_path, hot, dtype=name)
    with single_rank(config, tmp_path):
        layers = load(config, dtype, has_bias=has_bias, activation=activation)
        for layer, outputs, twin in zip(layers, expected, reference, strict=True):
            for m, output in zip(TOKENS, outputs, strict=True):
                assert torch.equal(run(layer, m), output)
            for parameter, original in zip(
                layer.parameters(), twin.parameters(), strict=True
            ):
                assert torch.equal(parameter, original)
                assert parameter.stride() == original.stride()
            residency = layer.expert_provider.residency()
            assert residency.hot_rows + residency.cold_rows == NUM_EXPERTS
            if hot in (0, NUM_EXPERTS):
                assert residency.hot_rows == hot
            else:
                assert residency.hot_bytes > 0 and residency.cold_bytes > 0


def test_budget_instead_of_the_cut(tmp_path):
    """Layers with steeper traffic get more of it, and no byte is lost or moved."""
    page = 4096
    options = {"hidden": 256, "intermediate": 512}
    flat, steep = rank_experts([9] * NUM_EXPERTS, 1), rank_experts(COUNTS, 1)
    entries = dict(zip(LAYER_NAMES, (flat, steep), strict=True))
    total = 2 * NUM_EXPERTS * 3 * 256 * 512 * 4
    gib = total / 4 / (1 << 30)
    config = pinned_config(
        tmp_path, 1, map_changes={"layers": entries}, expert_hbm_gib=gib
    )
    with single_rank(config, tmp_path):
        layers = load(config, torch.float32, **options)
        found = [layer.expert_provider.residency() for layer in layers]
        in_memory = sum(
            sum(pages_in_memory(p)) for layer in layers for p in layer.parameters()
        )
        outputs = [run(layer, 17) for layer in layers]
    assert sum(x.hot_bytes for x in found) == total / 4 == in_memory * page
    assert found[1].hot_bytes > found[0].hot_bytes
    assert found[1].expected_cold_bytes < found[0].expected_cold_bytes
    stock = engine_config(write_model(tmp_path / "model"))
    with single_rank(stock, tmp_path):
        for layer, output in zip(
            load(stock, torch.float32, **options), outputs, strict=True
        ):
            assert torch.equal(run(layer, 17), output)


def test_one_page_of_budget(tmp_path):
    """Less than a row is still a budget: its hottest page is hot."""
    config = pinned_config(tmp_path, hot=1, expert_hbm_gib=5000 / (1 << 30))
    with single_rank(config, tmp_path):
        layers = load(config, torch.float32)
        hot_pages = [pages_in_memory(p) for x in layers for p in x.parameters()]
        outputs = [run(layer, 17) for layer in layers]
    assert sum(map(sum, hot_pages)) == 1
    stock = engine_config(write_model(tmp_path / "model"))
    with single_rank(stock, tmp_path):
        for layer, output in zip(load(stock, torch.float32), outputs, strict=True):
            assert torch.equal(run(layer, 17), output)


def test_cold_rows_are_not_in_memory_after_load(tmp_path):
    config = pinned_config(tmp_path, hot=3)
    with single_rank(config, tmp_path):
        layers = load(config, torch.float32, hidden=256, intermediate=512)
        for layer in layers:
            residency = layer.expert_provider.residency()
            assert residency.hot_rows == 3
            in_memory = sum(
                sum(pages_in_memory(p)) for p in (layer.w13_weight, layer.w2_weight)
            )
            page = layer.expert_provider._layout.backing.page_bytes
            assert in_memory * page == residency.hot_bytes
            assert residency.expected_cold_share == pytest.approx(
                rank_experts(COUNTS, 3).expected_cold_share
            )


def test_second_attach_moves_nothing(tmp_path):
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        (layer, _) = load(config, torch.float32)
        before = [p.data_ptr() for p in layer.parameters()]
        attach_expert_weights(layer)
        assert [p.data_ptr() for p in layer.parameters()] == before


def test_reload_into_the_range(tmp_path):
    """Values change in hot and in cold rows; no tensor moves."""
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        (layer, other) = load(config, torch.float32)
        before = [p.data_ptr() for p in layer.parameters()]
        for parameter, new in zip(layer.parameters(), other.parameters(), strict=True):
            parameter.data.copy_(new)
        attach_expert_weights(layer)
        assert [p.data_ptr() for p in layer.parameters()] == before
        assert torch.equal(run(layer, 17), run(other, 17))


def test_model_that_writes_past_the_weight_loader_is_refused(tmp_path):
    """Its rows would be uninitialised memory, and nothing else would notice."""
    config = pinned_config(tmp_path, load_format="auto")
    with single_rank(config, tmp_path):
        layers = [build_layer(name) for name in LAYER_NAMES]
        model = torch.nn.ModuleList(layers)
        bind_expert_providers(model, config, config.model_config)
        layer = layers[0]
        for parameter in layer.parameters():
            parameter.data.copy_(torch.ones(parameter.shape))
        with pytest.raises(ValueError, match="no weights reached w13_weight") as error:
            finalize_layerwise_processing(model, config.model_config)
    assert LAYER_NAMES[0] in str(error.value)


@pytest.mark.parametrize("shown", (True, False))
def test_progress_is_shown_layer_by_layer(tmp_path, shown, capfd):
    config = pinned_config(tmp_path, use_tqdm_on_load=shown)
    with single_rank(config, tmp_path):
        layers = load(config, torch.float32)
        load_weights(layers[0])  # a second time is no progress
    lines = [x for x in capfd.readouterr().err.splitlines() if "Placing expert" in x]
    if shown:
        assert "2/2" in lines[-1] and "3/2" not in lines[-1]
    else:
        assert lines == []


def test_ranges_are_freed_with_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    config = pinned_config(tmp_path, model_changes={"head_dim": 32})
    with single_rank(config, tmp_path):
        model = get_model(vllm_config=config)
        layer = model.model.layers[0].mlp.experts.routed_experts
        backing = layer.expert_provider._layout.backing
        before = backing.locked_bytes
        assert before > 0 and layer.expert_provider.residency() is not None
        config.compilation_config.static_forward_context.clear()
        del model, layer
        gc.collect()
        assert backing.locked_bytes == 0


def test_changed_map_is_read_again(tmp_path):
    pinned_config(tmp_path, hot=3)
    (tmp_path / "map3.json").write_text("{}")
    with pytest.raises(ValueError, match="map3.json: format"):
        engine_config(
            tmp_path / "model",
            expert_provider="pinned_hot",
            expert_map=str(tmp_path / "map3.json"),
        )


def test_router_bias_does_not_stand_in_the_way(tmp_path):
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        bias = torch.nn.Parameter(torch.zeros(NUM_EXPERTS), requires_grad=False)
        options = {"e_score_correction_bias": bias, "scoring_func": "sigmoid"}
        load(config, torch.float32, **options)


# --------------------------------------------- what a layer may not look like


def process_and(layer, change):
    """Let the layer's post-processing end with a change to the layer."""
    process = layer.quant_method.process_weights_after_loading

    def process_then_change(target):
        process(target)
        change(target)

    layer.quant_method.process_weights_after_loading = process_then_change


def test_tensors_that_are_not_rows_stay_as_they_are(tmp_path):
    """Ids and rows keep their order, so whatever counts experts stays right."""
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        layers = [build_layer(name) for name in LAYER_NAMES]
        scalar = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
        layers[0].register_parameter("global_scale", scalar)
        scales = torch.nn.Parameter(torch.rand(NUM_EXPERTS, 2), requires_grad=False)
        layers[0].register_parameter("w13_input_scale", scales)
        before = scales.data_ptr()
        model = torch.nn.ModuleList(layers)
        bind_expert_providers(model, config, config.model_config)
        load_weights(layers[0])
        assert layers[0].expert_provider.residency() is not None
        assert layers[0].w13_input_scale.data_ptr() == before


@pytest.mark.parametrize(
    "value,problem",
    [(0.0, "all zero"), (float("inf"), "not finite"), (float("nan"), "not finite")],
)
def test_scale_that_the_checkpoint_lacks_is_refused(tmp_path, value, problem):
    """B18: of one cold expert, which no test prompt may ever pick."""
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        layers = [build_layer(name) for name in LAYER_NAMES]
        model = torch.nn.ModuleList(layers)
        bind_expert_providers(model, config, config.model_config)
        scales = torch.nn.Parameter(torch.ones(NUM_EXPERTS, 3), requires_grad=False)
        scales.data[6] = value
        process_and(
            layers[0], lambda x: x.register_parameter("w2_weight_scale", scales)
        )
        message = f"w2_weight_scale of experts .6. is {problem}"
        with pytest.raises(ValueError, match=message) as error:
            load_weights(layers[0])
    assert LAYER_NAMES[0] in str(error.value)


@pytest.mark.parametrize("zeroed", (True, False))
def test_padding_that_the_checkpoint_leaves_out_is_zero(tmp_path, monkeypatch, zeroed):
    """B19: where stock creates zeros, deferred rows start as zeros too."""
    table = tensors_module._BY_METHOD
    method = "UnquantizedFusedMoEMethod"
    monkeypatch.setitem(table, method, replace(table[method], zeroed=zeroed))
    config = pinned_config(tmp_path, load_format="auto")
    with single_rank(config, tmp_path):
        layers = [build_layer(name) for name in LAYER_NAMES]
        model = torch.nn.ModuleList(layers)
        bind_expert_providers(model, config, config.model_config)
        layer = layers[0]
        part = torch.ones(INTERMEDIATE, HIDDEN)
        # Uninitialised memory is NaN from here on.
        torch.use_deterministic_algorithms(True)
        try:
            for expert in range(NUM_EXPERTS):
                for name, shard, rows in (
                    ("w13_weight", "w1", part),
                    ("w2_weight", "w2", part.T.contiguous()),
                ):
                    parameter = getattr(layer, name)
                    parameter.weight_loader(parameter, rows, name, shard, expert)
            finalize_layerwise_processing(layer, config.model_config)
        finally:
            torch.use_deterministic_algorithms(False)
        assert bool(torch.isfinite(run(layer, 17)).all()) == zeroed
    assert layer.expert_provider.residency() is not None


@pytest.mark.parametrize("owner", ("layer", "experts", "quant config"))
def test_second_owner_of_the_rows_is_refused(tmp_path, owner):
    """A view taken in post-processing would read the memory the rows leave."""
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        layers = [build_layer(name) for name in LAYER_NAMES]
        model = torch.nn.ModuleList(layers)
        bind_expert_providers(model, config, config.model_config)

        def keep_a_view(layer):
            view = layer.w13_weight.data[1:].transpose(1, 2)
            if owner == "layer":
                layer.transposed = view
            elif owner == "experts":
                layer.quant_method.moe_kernel.fused_experts.transposed = view
            else:
                layer.quant_method.moe_quant_config._w1.scale = view

        process_and(layers[0], keep_a_view)
        with pytest.raises(ValueError, match="shares memory with its expert rows"):
            load_weights(layers[0])


def test_tensor_that_vanishes_in_post_processing_is_no_matter(tmp_path):
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        layers = [build_layer(n, has_bias=True) for n in LAYER_NAMES]
        model = torch.nn.ModuleList(layers)
        bind_expert_providers(model, config, config.model_config)
        process_and(layers[0], lambda x: delattr(x, "w13_bias"))
        load_weights(layers[0])
        attach_expert_weights(layers[0])
        assert layers[0].expert_provider.residency() is not None


def test_strided_rows_are_refused(tmp_path):
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        layers = [build_layer(name) for name in LAYER_NAMES]
        w2 = layers[0].w2_weight
        w2.data = torch.empty(w2.shape[::-1], device=w2.device).permute(2, 1, 0)
        with pytest.raises(ValueError, match="w2_weight has strides"):
            model = torch.nn.ModuleList(layers)
            bind_expert_providers(model, config, config.model_config)


def test_unknown_quantization_is_refused(tmp_path):
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        layers = [build_layer(name) for name in LAYER_NAMES]

        class OtherMethod(type(layers[0].quant_method)):
            pass

        layers[0].quant_method = copy.copy(layers[0].quant_method)
        layers[0].quant_method.__class__ = OtherMethod
        with pytest.raises(ValueError, match="OtherMethod has not been shown"):
            model = torch.nn.ModuleList(layers)
            bind_expert_providers(model, config, config.model_config)


def test_fused_shared_experts_are_refused(tmp_path):
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        layers = [build_layer(name) for name in LAYER_NAMES]
        layers[0].expert_map_manager._num_fused_shared_experts = 1
        layers[0].expert_map_manager.num_fused_shared_experts = 1
        with pytest.raises(ValueError, match="1 shared experts are fused"):
            model = torch.nn.ModuleList(layers)
            bind_expert_providers(model, config, config.model_config)


# ------------------------------------------------------- engines and maps


@pytest.mark.parametrize(
    "kwargs,named",
    [
        ({"expert_map": None}, "--expert-map"),
        ({"expert_split_mode": "staged"}, "--expert-split-mode"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"pipeline_parallel_size": 2}, "--tensor-parallel-size"),
        ({"cpu_offload_gb": 1}, "--cpu-offload-gb"),
        ({"offload_group_size": 2}, "--offload-group-size"),
        ({"load_format": "sharded_state"}, "--load-format sharded_state"),
        ({"expert_cold_dir": "/dev/null/x"}, "--expert-cold-dir /dev/null/x"),
        ({"expert_cold_tier": "peer:1"}, "--expert-cold-tier peer:1"),
        ({"expert_hbm_gib": "auto"}, "--expert-hbm-gib auto has no effect"),
        ({"expert_keep_kv_tokens": 64}, "--expert-keep-kv-tokens 64"),
    ],
)
def test_engine_that_cannot_be_served(tmp_path, kwargs, named):
    with pytest.raises(ValueError) as error:
        pinned_config(tmp_path, **kwargs)
    assert named in str(error.value)


def test_pinning_that_is_forbidden(monkeypatch):
    """A4: one environment variable means the same for every offloader."""
    monkeypatch.setattr(device_range, "driver", object())
    assert DeviceBacking.why_not_here("range") is None
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY", "1")
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY" in DeviceBacking.why_not_here(
        "split"
    )


def test_dense_model_is_refused_before_loading(tmp_path):
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    with pytest.raises(ValueError, match="no MoE layers"):
        pinned_config(tmp_path, model_changes=dense | {"num_experts": 0})


@pytest.mark.parametrize("layout", ("auto", "range"))
def test_layouts_that_are_there(tmp_path, layout):
    config = pinned_config(tmp_path, expert_layout=layout)
    assert config.offload_config.experts.expert_layout == layout


def test_map_of_another_model(tmp_path):
    with pytest.raises(ValueError, match="hidden_size is 64 in the map and 128"):
        pinned_config(tmp_path, model_changes={"hidden_size": 128})


def test_platform_without_backing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(ValueError, match="'cpu' has no page backing"):
        pinned_config(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        LAYER_NAMES[:1],
        ("layers.0.mlp.experts", "layers.1.mlp.experts"),
        tuple("language_model." + name for name in LAYER_NAMES),
        (*LAYER_NAMES, "model.layers.2.mlp.experts"),
    ],
)
def test_layer_names_must_match_the_built_model(tmp_path, names):
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        model = torch.nn.ModuleList([build_layer(name) for name in names])
        with pytest.raises(ValueError, match="layers") as error:
            bind_expert_providers(model, config, config.model_config)
    for name in set(names) ^ set(LAYER_NAMES):
        assert name in str(error.value)


def test_layers_inside_a_multimodal_wrapper(tmp_path):
    """The key is the layer's full name, wherever the wrapper puts it."""
    names = tuple("language_model." + name for name in LAYER_NAMES)
    entries = {name: rank_experts(COUNTS, 3) for name in names}
    config = pinned_config(tmp_path, map_changes={"layers": entries})
    with single_rank(config, tmp_path):
        layers = [build_layer(name) for name in names]
        model = torch.nn.ModuleDict({"language_model": torch.nn.ModuleList(layers)})
        bind_expert_providers(model, config, config.model_config)
        for layer in layers:
            load_weights(layer)
            assert layer.expert_provider.residency().cold_rows > 0


def test_failure_half_way_leaves_no_layer_serving(tmp_path, monkeypatch):
    """The error names the layer; nothing falls back to another memory."""
    config = pinned_config(tmp_path)
    real, calls = FileBacking._map, []

    def fails_third(self, source, size, hot):
        calls.append(size)
        if len(calls) == 3:
            raise OSError(12, "Cannot allocate memory")
        return real(self, source, size, hot)

    monkeypatch.setattr(FileBacking, "_map", fails_third)
    with (
        single_rank(config, tmp_path),
        pytest.raises(RuntimeError, match="locked already") as error,
    ):
        load(config, torch.float32)
    assert f"{LAYER_NAMES[1]}.w13_weight" in str(error.value)


# ------------------------------------------------------------ draft models


def draft_of(config):
    draft = copy.copy(config.model_config)
    draft.runner_type = "draft"
    return draft


DRAFT_NAMES = ("model.layers.2.mtp_block.mlp.experts",)


def test_draft_layers_stay_resident_unless_named(tmp_path):
    config = pinned_config(tmp_path)
    with single_rank(config, tmp_path):
        # The second has the name of a target layer: it was staged by then.
        layers = [build_layer(name) for name in (*DRAFT_NAMES, LAYER_NAMES[0])]
        bind_expert_providers(torch.nn.ModuleList(layers), config, draft_of(config))
        for layer in layers:
            assert type(layer.expert_provider) is ResidentProvider
            load_weights(layer)
            assert run(layer, 2).isfinite().all()


def test_named_draft_layers_are_served(tmp_path, monkeypatch):
    """A draft layer may have another number of experts."""
    monkeypatch.setattr(provider_module, "_loads_draft_model", lambda config: True)
    entries = {DRAFT_NAMES[0]: rank_experts([5, 1, 9, 2], hot=1)}
    config = pinned_config(tmp_path, map_changes={"draft_layers": entries})
    with single_rank(config, tmp_path):
        layer = build_layer(DRAFT_NAMES[0], num_experts=4)
        model = torch.nn.ModuleList([layer])
        bind_expert_providers(model, config, draft_of(config))
        load_weights(layer)
        assert isinstance(layer.expert_provider, PinnedHotProvider)
        assert layer.expert_provider.residency().hot_rows == 1


def test_draft_layers_without_a_draft_model(tmp_path):
    entries = {DRAFT_NAMES[0]: rank_experts(COUNTS, hot=1)}
    with pytest.raises(ValueError, match="draft_layers.*no draft model"):
        pinned_config(tmp_path, map_changes={"draft_layers": entries})


def test_unknown_draft_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(provider_module, "_loads_draft_model", lambda config: True)
    entries = {"model.layers.9.mlp.experts": rank_experts(COUNTS, hot=1)}
    config = pinned_config(tmp_path, map_changes={"draft_layers": entries})
    with single_rank(config, tmp_path):
        model = torch.nn.ModuleList([build_layer(DRAFT_NAMES[0])])
        with pytest.raises(ValueError, match="draft_layers") as error:
            bind_expert_providers(model, config, draft_of(config))
    assert "model.layers.9" in str(error.value) and DRAFT_NAMES[0] in str(error.value)


def test_whole_map_is_used(tmp_path):
    assert set(make_map().layers) == set(LAYER_NAMES)
