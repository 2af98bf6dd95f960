"""Compare the finalize kernel of layout `split` with FlashInfer's, bit for bit.

FlashInfer's sources are compiled as they are, from an unpacked flashinfer-python wheel
(`--flashinfer`, the folder that holds `flashinfer/data`), with its own flags. Needs a
CUDA GPU, nvcc, torch and Triton; neither vLLM nor FlashInfer has to be installed.
"""

import argparse
import ctypes
import importlib.util
import itertools
import json
import multiprocessing
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
FINALIZE = (
    HERE.parents[2]
    / "overlay/vllm/model_executor/layers/fused_moe/pinned_hot/split/finalize.py"
)
DEV_KERNEL = "csrc/fused_moe/trtllm_backend/trtllm_fused_moe_dev_kernel.cu"

# What FlashInfer gives nvcc for this file (its jit/core.py, jit/cpp_ext.py and
# jit/fused_moe.py), the architecture apart: these kernels have no sm_100 code.
FLAGS = (
    "-std=c++17",
    "-use_fast_math",
    "-Xfatbin=-compress-all",
    "--compress-mode=size",
    "-DFLASHINFER_ENABLE_F16",
    "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3",
    "-DFLASHINFER_ENABLE_FP8_E5M2",
    "-DNDEBUG",
    "-O3",
    "-DTLLM_GEN_EXPORT_INTERFACE",
    "-DTLLM_GEN_EXPORT_FLASHINFER",
    "-DTLLM_ENABLE_CUDA",
    "-DENABLE_BF16",
    "-DENABLE_FP8",
    "-DENABLE_FP4",
    "-DCUTLASS_ENABLE_GDC_FOR_SM100=1",
    "-DFLASHINFER_ENABLE_FP8_E8M0",
    "-DFLASHINFER_ENABLE_FP4_E2M1",
    "--compiler-options=-fPIC",
    "--expt-relaxed-constexpr",
    "-static-global-template-stub=false",
)

KERNELS = {"chosen": 0, "scalar": 1, "vector": 2}
TOP_KS = tuple(range(1, 17))
HIDDENS = (1, 7, 128, 1000, 2567, 5120, 7168)
TOKENS = (1, 5, 70)
WORKERS = 8


def nvcc_command(flashinfer: Path, arch: str, output: Path) -> list[str]:
    """The compiler's command line for FlashInfer's finalize kernels.

    Args:
        flashinfer: Folder that holds `flashinfer/data`.
        arch: `90a` and the like; a name that starts with `compute_` writes PTX.
        output: File to write.

    """
    data = flashinfer.resolve() / "flashinfer" / "data"
    if not (data / DEV_KERNEL).is_file():
        raise SystemExit(
            f"--flashinfer {flashinfer}: no flashinfer/data/{DEV_KERNEL}. Unpack the "
            "wheel of flashinfer-python there"
        )
    ptx = arch.startswith("compute_")
    return [
        "nvcc",
        *FLAGS,
        *(
            (f"-arch={arch}", "-ptx")
            if ptx
            else (f"-gencode=arch=compute_{arch},code=sm_{arch}", "--shared")
        ),
        *(
            f"-I{folder}"
            for folder in (
                HERE / "shim",
                data / "include",
                data / "csrc/nv_internal",
                data / "csrc/nv_internal/include",
                data / "cutlass/include",
            )
        ),
        f'-DFLASHINFER_DEV_KERNEL="{data / DEV_KERNEL}"',
        "-o",
        str(output),
        str(HERE / "flashinfer_finalize.cu"),
    ]


def load_finalize() -> Any:
    """Import the overlay's module on its own, on torch and Triton alone."""
    import triton
    import triton.language as tl

    for name, values in {
        "vllm": {},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.fused_moe": {},
        "vllm.model_executor.layers.fused_moe.moe_output": {
            "UnfinalizedMoEOutput": SimpleNamespace
        },
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    spec = importlib.util.spec_from_file_location("split_finalize", FINALIZE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Case:
    """One batch, as FlashInfer has it and as the split layout does.

    Attributes:
        rows: `(P, K_padded)` GEMM2 rows; rows that no slot names hold NaN.
        index: int32 `(M, top_k)`, row of each slot or -1.
        weights: `(M, top_k)`.
        parts: Rows and index of the hot and of the cold part.
        hidden: K.

    """

    rows: Any
    index: Any
    weights: Any
    parts: list[tuple[Any, Any]]
    hidden: int

    def out(self) -> Any:
        import torch

        shape = (self.index.shape[0], self.hidden)
        return torch.full(
            shape, float("nan"), dtype=self.rows.dtype, device=self.rows.device
        )


def make_values(shape: tuple[int, ...], dtype: Any, kind: str, generator: Any) -> Any:
    """Values of a kind: `normal`, `wide` exponents, or `tiny` ones, many subnormal."""
    import torch

    device = generator.device
    values = torch.randn(shape, device=device, generator=generator)
    if kind == "wide":
        exponents = torch.randint(-12, 13, shape, device=device, generator=generator)
        values = values * 2.0**exponents
    if kind == "tiny":
        bits = torch.randint(
            0, 1 << 15, shape, device=device, generator=generator, dtype=torch.int32
        )
        # Exponents of the dtype's two lowest binades, sign at random.
        mantissa = 7 if dtype == torch.bfloat16 else 10
        low = bits & ((2 << mantissa) - 1)
        sign = torch.where(values < 0, -32768, 0)
        return (low + sign).to(torch.int16).view(dtype)
    return values.to(dtype)


def make_case(
    tokens: int,
    top_k: int,
    hidden: int,
    padded: int,
    dtype: Any,
    weights_dtype: Any,
    kind: str,
    seed: int,
    hot_share: float = 0.6,
) -> Case:
    """A batch with missing slots, an empty token and NaN in rows nobody names."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    slots = tokens * top_k
    num_rows = slots + 9
    rows = make_values((num_rows, padded), dtype, kind, generator)
    index = torch.randperm(num_rows, device="cuda", generator=generator)[:slots]
    missing = torch.rand(slots, device="cuda", generator=generator) < 0.2
    index = torch.where(missing, -1, index).to(torch.int32).view(tokens, top_k)
    if tokens > 2:
        index[1] = -1
    used = torch.zeros(num_rows, dtype=torch.bool, device="cuda")
    used[index[index >= 0].long()] = True
    rows[~used] = float("nan")
    weights = torch.rand((tokens, top_k), device="cuda", generator=generator)
    if kind == "tiny":
        # The third is subnormal; the fourth makes ties at the smallest normal.
        scales = torch.tensor([1.0, 2.0**-3, 2.0**-127, 1.0], device="cuda")
        pick = torch.randint(0, 4, (tokens, top_k), device="cuda", generator=generator)
        weights = torch.where(pick == 3, 1 - 2.0**-24, weights * scales[pick])
    weights = weights.to(weights_dtype)

    is_hot = torch.rand((tokens, top_k), device="cuda", generator=generator) < hot_share
    parts = []
    for mask in (is_hot, ~is_hot):
        taken = mask & (index >= 0)
        chosen = index[taken].long()
        part = torch.full(
            (chosen.numel() + 5, padded), float("nan"), dtype=dtype, device="cuda"
        )
        where = torch.randperm(part.shape[0], device="cuda", generator=generator)
        where = where[: chosen.numel()]
        part[where] = rows[chosen]
        part_index = torch.full_like(index, -1)
        part_index[taken] = where.to(torch.int32)
        parts.append((part, part_index))
    return Case(rows, index, weights, parts, hidden)


def flashinfer_out(library: ctypes.CDLL, kernel: str, case: Case) -> Any:
    """FlashInfer's output of the unsplit batch."""
    import torch

    out = case.out()
    status = library.flashinfer_finalize(
        KERNELS[kernel],
        int(case.rows.dtype == torch.float16),
        int(case.weights.dtype == torch.bfloat16),
        ctypes.c_void_p(case.rows.data_ptr()),
        ctypes.c_void_p(case.weights.data_ptr()),
        ctypes.c_void_p(case.index.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        *case.index.shape,
        case.hidden,
        case.rows.shape[1],
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    if status:
        raise RuntimeError(f"FlashInfer's {kernel} kernel did not run")
    return out


def differing(left: Any, right: Any) -> int:
    """Elements whose bits differ."""
    import torch

    return int((left.view(torch.int16) != right.view(torch.int16)).sum())


def naive_out(case: Case, by_part: bool) -> Any:
    """What must differ somewhere: no fused multiply-add, or partial sums added."""
    import torch

    def total(rows: Any, index: Any) -> Any:
        acc = torch.zeros(
            (index.shape[0], case.hidden), dtype=torch.float32, device="cuda"
        )
        for k in range(index.shape[1]):
            value = rows[index[:, k].clamp(min=0).long(), : case.hidden].float()
            added = acc + case.weights[:, k : k + 1].float() * value
            acc = torch.where(index[:, k : k + 1] >= 0, added, acc)
        return acc.to(rows.dtype)

    if not by_part:
        return total(case.rows, case.index)
    return total(*case.parts[0]) + total(*case.parts[1])


def compare_top_k(library_path: str, top_k: int) -> dict[str, Any]:
    """All shapes, dtypes and kinds of values at one top_k."""
    import torch

    finalize = load_finalize()
    library = ctypes.CDLL(library_path)
    wrong: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    seed = 1000 * top_k
    for dtype, weights_dtype in itertools.product(
        (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)
    ):
        if weights_dtype == torch.bfloat16 and top_k not in (1, 6, 8, 16):
            continue
        for hidden, tokens, kind in itertools.product(
            HIDDENS, TOKENS, ("normal", "wide", "tiny")
        ):
            seed += 1
            padded = -(-hidden // 128) * 128 if seed % 2 else hidden
            case = make_case(
                tokens, top_k, hidden, padded, dtype, weights_dtype, kind, seed
            )
            (hot, hot_index), (cold, cold_index) = case.parts
            ours = case.out()
            finalize.finalize_parts(
                hot, cold, hot_index, cold_index, case.weights, ours
            )
            results = {"split": ours}
            if kind != "normal" and tokens == 5:
                alone = case.out()
                finalize.finalize_parts(
                    case.rows, None, case.index, None, case.weights, alone
                )
                results["one part"] = alone
                reference = case.out()
                finalize.finalize_parts_reference(
                    hot, cold, hot_index, cold_index, case.weights, reference
                )
                results["reference"] = reference
            merged = finalize.merge_parts(
                [
                    SimpleNamespace(
                        gemm2_permuted=rows, expanded_idx_to_permuted_idx=index
                    )
                    for rows, index in case.parts
                ],
                case.weights,
            )
            merged_case = Case(
                merged.gemm2_permuted,
                merged.expanded_idx_to_permuted_idx,
                merged.expert_weights,
                [],
                hidden,
            )
            for kernel in KERNELS:
                # The vector kernel reads 16 bytes at a time. FlashInfer chooses it
                # for batches of any width.
                if hidden % 8 and (
                    kernel == "vector"
                    or (hidden + 255) // 256 * min(tokens, 8192) >= 1184
                ):
                    continue
                if padded % 8 and kernel == "vector":
                    continue
                theirs = flashinfer_out(library, kernel, case)
                results[f"merged, {kernel}"] = flashinfer_out(
                    library, kernel, merged_case
                )
                for name, out in results.items():
                    if name.startswith("merged") and not name.endswith(kernel):
                        continue
                    label = f"{kernel}: {name}"
                    seen[label] += theirs.numel()
                    wrong[label] += differing(theirs, out)
                if kind == "wide" and top_k > 1:
                    for name, by_part in (("unfused", False), ("partial sums", True)):
                        seen[f"control, {name}"] += theirs.numel()
                        wrong[f"control, {name}"] += differing(
                            theirs, naive_out(case, by_part)
                        )
    torch.cuda.synchronize()
    return {"top_k": top_k, "seen": dict(seen), "wrong": dict(wrong)}


def is_ours(label: str) -> bool:
    """Whether a result has to be equal: no control, and not torch's reference.

    The reference stands in on the CPU and differs in subnormal results.
    """
    return not label.startswith("control") and not label.endswith("reference")


def compare_flush(library_path: str) -> dict[str, Any]:
    """How the interpreter's stand-in for the flushing instruction compares."""
    import torch

    finalize = load_finalize()
    library = ctypes.CDLL(library_path)
    case = make_case(
        70, 6, 1024, 1024, torch.bfloat16, torch.float32, "tiny", 7, hot_share=1.1
    )
    theirs = flashinfer_out(library, "scalar", case)
    out = case.out()
    finalize._finalize_parts_kernel[(70, 1)](
        case.rows,
        out,
        case.index,
        case.index,
        case.weights,
        out,
        1024,
        1024,
        0,
        6,
        1024,
        TOP_K=6,
        HAS_HOT=True,
        HAS_COLD=False,
        BLOCK=1024,
        NATIVE=False,
    )
    return {"elements": out.numel(), "differing": differing(theirs, out)}


def time_kernels(library_path: str) -> list[dict[str, Any]]:
    """Microseconds a launch in a graph, at the shape of the reference model."""
    import torch

    finalize = load_finalize()
    library = ctypes.CDLL(library_path)
    rows = []
    for tokens in (1, 16, 64, 512):
        case = make_case(
            tokens, 6, 5120, 5120, torch.bfloat16, torch.float32, "normal", tokens
        )
        (hot, hot_index), (cold, cold_index) = case.parts
        ours, row = case.out(), {"tokens": tokens}

        def split(
            parts: Any = (hot, cold, hot_index, cold_index),
            case: Any = case,
            ours: Any = ours,
        ) -> None:
            finalize.finalize_parts(*parts, case.weights, ours)

        for name, launch in (
            ("split_us", split),
            ("flashinfer_us", partial(flashinfer_out, library, "chosen", case)),
        ):
            launch()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(50):
                    launch()
            graph.replay()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                graph.replay()
            end.record()
            end.synchronize()
            row[name] = round(start.elapsed_time(end) * 1000 / 500, 2)
        rows.append(row)
    return rows


def main() -> None:
    """Compile, compare, write the result, fail if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flashinfer", type=Path, help="unpacked wheel")
    parser.add_argument(
        "--library", type=Path, default=Path("/tmp/flashinfer_finalize.so")
    )
    parser.add_argument("--arch", default="90a", help="90a, 100a, compute_100a (PTX)")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args()
    if args.flashinfer is not None:
        if shutil.which("nvcc") is None:
            raise SystemExit("nvcc is not on PATH: install the CUDA toolkit")
        subprocess.run(
            nvcc_command(args.flashinfer, args.arch, args.library), check=True
        )
    elif not args.library.is_file():
        raise SystemExit(f"--library {args.library}: not there; give --flashinfer")
    if args.build_only:
        return

    import torch
    import triton

    library = str(args.library.resolve())
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        by_top_k = list(pool.map(partial(compare_top_k, library), reversed(TOP_KS)))
    seen: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for part in by_top_k:
        seen.update(part["seen"])
        wrong.update(part["wrong"])
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "elements": dict(sorted(seen.items())),
        "differing": {key: wrong[key] for key in sorted(seen)},
        "differing_by_top_k": {
            part["top_k"]: sum(
                count for key, count in part["wrong"].items() if is_ours(key)
            )
            for part in by_top_k
        },
        "select_instead_of_flush": compare_flush(library),
        "microseconds": time_kernels(library),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text)
    failed = [k for k in seen if is_ours(k) and wrong[k]]
    blind = [k for k in seen if k.startswith("control") and not wrong[k]]
    if failed or blind:
        raise SystemExit(f"bits differ: {failed}; controls that do not: {blind}")


if __name__ == "__main__":
    main()
