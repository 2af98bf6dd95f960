"""Count which experts a vLLM server's routers select, asked over its own RPC.

A worker extension (``--worker-extension-cls``): vLLM mixes the class into its worker
and calls the methods by name. It listens where vLLM's own capture of routed experts
does, at the routers, and needs neither a GPU nor another model runner.
"""

import sys
from functools import partial
from typing import Any


class RouteCounter:
    """Counts selections per layer and logical expert between two questions."""

    _selections: dict[str, list[int]]
    _layers_by_name: dict[str, Any]

    def reset_routes(self) -> None:
        """Start to count, from zero; the first call finds the routers."""
        layers = self._moe_layers()
        if not hasattr(self, "_selections"):
            for name, layer in layers.items():
                layer.router.set_capture_fn(partial(self._count_routes, name))
        self._selections = {
            name: [0] * layer.moe_config.num_logical_experts
            for name, layer in layers.items()
        }

    def read_routes(self) -> dict[str, list[int]]:
        """Return the selections of each expert, ``(E,)``, by layer name."""
        return self._selections

    def describe_experts(self) -> dict[str, object]:
        """Return which vLLM runs here and where the experts of each layer lie."""
        residency: dict[str, object] = {}
        providers = set()
        for name, layer in self._moe_layers().items():
            provider = getattr(layer.routed_experts, "expert_provider", None)
            providers.add(None if provider is None else provider.name)
            where = None if provider is None else provider.residency()
            residency[name] = None if where is None else vars(where)
        return {
            "vllm": sys.modules["vllm"].__file__,
            "providers": sorted(providers, key=str),
            "residency": residency,
        }

    def _count_routes(self, layer_name: str, topk_ids: Any) -> None:
        counts = self._selections[layer_name]
        for expert in topk_ids.flatten().tolist():
            if not 0 <= expert < len(counts):  # -1 would be padding
                raise ValueError(f"{layer_name}: {expert} is no expert")
            counts[expert] += 1

    def _moe_layers(self) -> dict[str, Any]:
        if not hasattr(self, "_layers_by_name"):
            self._layers_by_name = {
                module.layer_name: module
                for module in self.get_model().modules()  # type: ignore[attr-defined]
                if hasattr(module, "router") and hasattr(module, "routed_experts")
            }
        return self._layers_by_name
