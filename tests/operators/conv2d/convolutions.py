"""What the three convolutions declare alike: refusals, references, random cases, schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from codegen.fixed_point import over_ring
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.convolution.problem import Convolution
from codegen.problem import LARGEST_EXTENT
from tests.operators.conv2d.kernels import ALIGNS, convolution
from tests.operators.conv2d.random_cases import random_cases as random_convolutions
from tests.operators.harness.declarations import LEVEL_0, SM_90A, Array, Inputs, Problems, RandomCases, References
from tests.operators.harness.machine_code import Codes
from tests.support.kernels.ring_integers import finished

Fields = dict[str, Any]
# A layer, one with halves, one without sums over channels.
LAYER: Fields = {"n": 8, "h": 28, "w": 28, "c": 128, "k": 128, "padding": 1}
HALF: Fields = {**LAYER, "dtype": "float16"}
DEPTHWISE: Fields = {**HALF, "groups": 128}
POINT: Fields = {"r": 1, "s": 1, "padding": 0}
STEM: Fields = {**HALF, "c": 3, "r": 7, "s": 7, "stride": 2, "padding": 3}
TF32: Fields = {**LAYER, "dtype": "float32", "allow_tf32": True}
TENSOR: Fields = {
    "algorithm": "implicit_gemm", "tile_m": 64, "tile_n": 64, "tile_k": 32, "warps_m": 2, "warps_n": 2, "stages": 3,
    "fragments": 2, "mma_k": 16, "copy": "cp_async", "epilogue_path": "shared", "min_blocks": 1, "maxnreg": 0,
    "split": "none", "split_k": 1, "stream_blocks": 0, "raster": 0,
}  # fmt: skip
BY_ELEMENT: Fields = {**TENSOR, "copy": "registers", "stages": 2, "fragments": 1}
# Of the CUDA cores, 1024 threads, of which none has more than 64 registers.
MANY_THREADS: Fields = {
    "algorithm": "implicit_gemm", "tile_k": 8, "thread_m": 4, "thread_n": 2, "stages": 2, "padding": 0, "unroll_k": 8,
    "min_blocks": 1, "split": "none", "split_k": 1, "raster": 0,
}  # fmt: skip
REGISTERS: Fields = {"copy": "registers"}
WIDE: Fields = {"tile_m": 32, "tile_n": 64, "warps_m": 1, "warps_n": 2, "epilogue_path": "shared"}
DO_NOT_FIT = "or the attributes (such as stride and padding) do not fit"
OUT = "address=0x50000000"


def level_0(name: str, **fields: Any) -> Candidate:
    (candidate,) = lower(convolution(name, **fields), SM_90A, LEVEL_0).candidates
    return candidate


# ---- problems

REFUSED: Sequence[tuple[Fields, str, str]] = [
    ({"h": 0}, "h", "greater than or equal to 1"),
    ({"k": 1.5}, "k", "valid integer"),
    ({"c": "16"}, "c", "valid integer"),
    ({"n": LARGEST_EXTENT + 1}, "n", str(LARGEST_EXTENT)),
    ({"groups": 0}, "groups", "greater than or equal to 1"),
    ({"groups": 5}, "groups", "is 5, which does not divide the 16 channels (c)"),
    ({"groups": 16}, "groups", "is 16, which does not divide the 24 filters (k)"),
    ({"stride": [0, 1]}, "stride.0", "greater than or equal to 1"),
    ({"stride": [1]}, "stride.1", "Field required"),
    ({"dilation": [0, 2]}, "dilation.0", "greater than or equal to 1"),
    ({"padding": [1, -1]}, "padding.1", "greater than or equal to 0"),
    ({"padding": "same"}, "padding", "a number, or an array of two"),
    ({"padding": -1}, "padding", "greater than or equal to 0"),
    ({"padding": [[0, -1], 1]}, "padding.0.1", "greater than or equal to 0"),
    ({"padding": [[0, 1, 0], 1]}, "padding.0", "at most 2 items"),
    ({"h": 1, "padding": [[1, 0], 1]}, "padding", "is 1 and 0: h = 1 is 2 with it, less than the 3"),
    ({"h": 2}, "padding", "h = 2 is 2 with it, less than the 3 that 3 elements of the filter span with dilation 1"),
    ({"w": 4, "dilation": [1, 3], "padding": [0, 1]}, "padding", "w = 4 is 6 with it, less than the 7"),
    ({"padding": [0, 2**30]}, "padding", f"is 1073741824: w is 2147483658 with it; at most {LARGEST_EXTENT}"),
    ({"layout": "hwcn"}, "layout", "'nhwc' or 'nchw'"),
    ({"dtype": "int8"}, "dtype", "'bfloat16', 'int32' or 'int64'"),
    ({"acc_dtype": "float16"}, "acc_dtype", "does not go with dtype float32; allowed: float32"),
    ({"out_dtype": "int32"}, "out_dtype", "allowed: float32, float16, bfloat16"),
    ({"fraction_bits": 8}, "fraction_bits", "is 8, but float32 is no fixed point: dtype int32 or int64 is"),
    ({"truncation": {"policy": "exact_once"}}, "truncation", "is exact_once, but float32 is no fixed point"),
    ({"rounding": "floor"}, "rounding", "is floor, but float32 is no fixed point"),
    ({"epilogue": [{"op": "pool"}]}, "epilogue.0", "does not match any of the expected tags"),
    ({"depth": 3}, "depth", "not permitted"),
    ({"p": 3}, "p", "not permitted"),
]
CANONICAL: Fields = {
    "n": 2, "h": 12, "w": 10, "c": 16, "k": 24, "r": 3, "s": 3, "groups": 1, "layout": "nhwc", "stride": [1, 1],
    "dilation": [1, 1], "padding": [[1, 1], [1, 1]], "dtype": "float32", "acc_dtype": "float32", "out_dtype": "float32",
    "allow_tf32": False, "epilogue": [],
}  # fmt: skip
ALIKE: Sequence[tuple[Fields, Fields]] = [
    ({"padding": [1.0, 1], "stride": 1.0}, {"padding": 1, "groups": 1}),
    ({"padding": [1, [1, 1]]}, {"padding": [[1, 1], [1, 1]]}),
    ({"r": 1, "dilation": [5, 1]}, {"r": 1}),
    ({"r": 1, "s": 1, "dilation": 7}, {"r": 1, "s": 1}),
    ({"dtype": "float16", "allow_tf32": True}, {"dtype": "float16"}),
]
SMALL = {"n": 1, "h": 8, "w": 8, "c": 3, "k": 4, "r": 3, "s": 3}
IN_SCHEMA: Sequence[Fields] = [
    {**SMALL, **change}
    for change in ({"stride": [2, 2]}, {"stride": 2}, {"padding": 1}, {"padding": [1, 2]}, {"padding": [[0, 1], 1]})
]


def problems(
    name: str, *, refused: Sequence[Any], aligned: Sequence[Any], alike: Sequence[Any] = (), **own: Any
) -> Problems:
    return Problems(
        refused=[*REFUSED, *refused],
        defaults=[({"padding": 1}, CANONICAL)],
        alike=[*ALIKE, *alike],
        aligned=[(fields, dict(zip(ALIGNS[name], expected, strict=True))) for fields, expected in aligned],
        in_schema=IN_SCHEMA,
        out_of_schema=[{**SMALL, "n": 0}],
        **own,
    )


# ---- the reference

DEFINED: dict[str, Fields] = {
    "plain": {"n": 1, "h": 5, "w": 6, "c": 3, "k": 4},
    "padding of one side": {"n": 2, "h": 5, "w": 4, "c": 2, "k": 3, "padding": [[0, 1], [2, 0]], "stride": 2},
    "padding": {"n": 2, "h": 4, "w": 3, "c": 2, "k": 3, "padding": [2, 1]},
    "a stride that leaves elements": {"n": 2, "h": 8, "w": 9, "c": 2, "k": 3, "stride": [3, 2]},
    "dilation, groups": {"n": 2, "h": 9, "w": 8, "c": 4, "k": 6, "groups": 2, "dilation": [2, 3], "padding": [1, 2]},
    "groups, dilation, stride": {"n": 1, "h": 9, "w": 8, "c": 4, "k": 6, "groups": 2, "dilation": 2, "stride": [2, 3]},
    "depthwise": {"n": 2, "h": 6, "w": 5, "c": 4, "k": 4, "groups": 4, "padding": 1},
    "depthwise, stride": {"n": 2, "h": 6, "w": 5, "c": 4, "k": 4, "groups": 4, "padding": 1, "stride": 2},
    "depthwise, multiplied": {"n": 1, "h": 6, "w": 5, "c": 3, "k": 6, "groups": 3, "stride": 2},
    "windows of padding alone": {"n": 1, "h": 2, "w": 2, "c": 2, "k": 2, "r": 2, "s": 2, "padding": 4, "stride": 2},
    "1 x 1": {"n": 2, "h": 3, "w": 4, "c": 5, "k": 3, "r": 1, "s": 1},
    "1 x 1, stride": {"n": 2, "h": 3, "w": 4, "c": 5, "k": 3, "r": 1, "s": 1, "stride": 2},
}  # fmt: skip
LAYOUTS = ("nhwc", "nchw")


def channels_first(p: Convolution, values: Array) -> Array:
    return values.transpose(0, 3, 1, 2) if p.layout == "nhwc" else values


def sums(p: Convolution, inputs: Inputs) -> Array:
    """One product after the other: each belongs to an element of x, one of w and one of the output. Channels first."""
    kind = object if over_ring(p) else float
    given = {name: channels_first(p, inputs[name]).astype(kind) for name in ("x", "w", "dy") if name in inputs}
    shapes = {"x": (p.n, p.c, p.h, p.w), "w": (p.k, p.c // p.groups, p.r, p.s), "dy": (p.n, p.k, p.p, p.q)}
    (missing,) = shapes.keys() - given.keys()
    result = np.zeros(shapes[missing], kind)
    for n, k, row, column, c, r, s in np.ndindex(*shapes["dy"], *shapes["w"][1:]):
        h = row * p.stride[0] - p.corner[0] + r * p.dilation[0]
        v = column * p.stride[1] - p.corner[1] + s * p.dilation[1]
        if 0 <= h < p.h and 0 <= v < p.w:
            channel = k // (p.k // p.groups) * (p.c // p.groups) + c
            at = {"x": (n, channel, h, v), "w": (k, c, r, s), "dy": (n, k, row, column)}
            first, second = (given[name][at[name]] for name in given)
            result[at[missing]] += first * second
    return result


def definition(p: Convolution, inputs: Inputs) -> Array:
    result, vector = sums(p, inputs), (-1, *[1] * (3 if p.writes == "dw" else 2))
    if over_ring(p):
        tensors = {
            name: values.reshape(vector) if name == "bias" else channels_first(p, values)
            for name, values in inputs.items()
            if name not in p.reads
        }
        result = finished(p, result, tensors)
        return result.transpose(0, 2, 3, 1) if p.layout == "nhwc" else result
    for node in p.epilogue:
        match node.op:
            case "bias":
                result += inputs["bias"].reshape(vector)
            case "residual":
                result += channels_first(p, inputs["residual"])
            case "mask":
                result = np.where(channels_first(p, inputs["mask"]) != 0, result, 0.0)
            case "relu":
                result = np.maximum(result, 0.0)
            case "scale":
                result *= node.value
    return result.transpose(0, 2, 3, 1) if p.layout == "nhwc" else result


def by_torch(p: Convolution, inputs: Inputs) -> Array:
    """Of a gradient by autograd. Elements that no window meets are NaN, which autograd may multiply with zeros."""
    import torch

    def given(name: str, *shape: int) -> Any:
        if name not in inputs:
            return torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        values = inputs[name].astype(np.float64)
        values = values if p.operator == "conv2d" else np.nan_to_num(values)
        return torch.from_numpy(channels_first(p, values))

    x, w = given("x", p.n, p.c, p.h, p.w), given("w", p.k, p.c // p.groups, p.r, p.s)
    padded = torch.nn.functional.pad(x, (*p.padding[1], *p.padding[0]))
    result = torch.nn.functional.conv2d(padded, w, stride=p.stride, dilation=p.dilation, groups=p.groups)
    if "dy" in inputs:
        result.backward(given("dy"))
        result = x.grad if p.operator == "conv2d_dgrad" else w.grad
    array: Array = result.numpy()
    return array.transpose(0, 2, 3, 1) if p.layout == "nhwc" else array


def in_fp32(p: Convolution, inputs: Inputs, lost: bool) -> Array:
    """Of 3 x 3 filters with a padding of 1, channels last; lost is a product of each sum, or a pixel of the last."""
    given = {name: values.astype(np.float32) for name, values in inputs.items()}
    padded = np.zeros((p.n, p.h + 2, p.w + 2, p.c), np.float32)
    if p.operator == "conv2d":
        padded[:, 1:-1, 1:-1] = given["x"]
        out = np.zeros((p.n, p.p, p.q, p.k), np.float32)
        for r, s, c in np.ndindex(3, 3, p.c):
            if not lost or (r, s, c) != (2, 1, 11):
                out += padded[:, r : r + p.p, s : s + p.q, c, None] * given["w"][:, r, s, c]
        return out
    if p.operator == "conv2d_dgrad":
        (step, _) = p.stride
        for r, s, k in np.ndindex(3, 3, p.k):
            if not lost or (r, s, k) != (2, 1, 11):
                at = np.s_[:, r : r + step * (p.p - 1) + 1 : step, s : s + step * (p.q - 1) + 1 : step]
                padded[at] += given["dy"][..., k, None] * given["w"][k, r, s]
        return padded[:, 1:-1, 1:-1]
    padded[:, 1:-1, 1:-1] = given["x"]
    dw = np.zeros((p.k, 3, 3, p.c), np.float32)
    for n, row, column in np.ndindex(p.n, p.p, p.q):
        if not lost or (n, row, column) != (1, 11, 9):
            dw += given["dy"][n, row, column, :, None, None, None] * padded[n, row : row + 3, column : column + 3]
    return dw


def references(
    *, epilogue: Sequence[Fields], device_epilogue: Sequence[Fields], bounded: Fields, strides: Sequence[int] = (1,)
) -> References:
    with_nodes = {"n": 1, "h": 4, "w": 5, "c": 2, "k": 3, "stride": strides[-1], "padding": strides[-1] - 1}
    every = {**DEFINED, "epilogue": {**with_nodes, "epilogue": epilogue}}
    device = {"groups": 2, "stride": 2, "padding": 1, "epilogue": device_epilogue}
    return References(
        definition=definition,
        defined={
            f"{name}, {layout}": {"layout": layout, **fields} for name, fields in every.items() for layout in LAYOUTS
        },
        by_torch=by_torch,
        in_fp32=in_fp32,
        bounded={
            f"{dtype}, stride {stride}": {
                **bounded,
                "padding": 1,
                "stride": stride,
                "dtype": dtype,
                "out_dtype": "float32",
            }
            for dtype in ("float32", "float16", "bfloat16")
            for stride in strides
        },
        on_device=[
            ("normal", {**device, "layout": layout, "allow_tf32": tf32}) for layout in LAYOUTS for tf32 in (False, True)
        ],
    )


# ---- random cases


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
    assert isinstance(p, Convolution)
    counts = Counter([f"target {arch}", f"layout {p.layout}", f"inputs {p.dtype}", f"out {p.out_dtype}"])
    counts.update(f"{name} {t[name]}" for name in ("algorithm", "split", "copy", "window", "epilogue") if name in t)
    counts.update(f"{name} {s[name]}" for name in ALIGNS[p.operator])
    counts[f"{min(len(p.epilogue), 2)} or more nodes"] += 1
    kind = "pointwise" if p.pointwise else "depthwise" if p.depthwise else "groups" if p.groups > 1 else "dense"
    counts[kind] += 1
    counts["stride" if max(p.stride) > 1 else "no stride"] += 1
    counts["dilation" if max(p.dilation) > 1 else "no dilation"] += 1
    counts["padding" if p.padded != (p.h, p.w) else "no padding"] += 1
    counts["several images" if p.n > 1 else "one image"] += 1
    implicit = t["algorithm"] == "implicit_gemm"
    about = {
        "tensor cores": implicit and "mma_k" in t, "CUDA cores": implicit and "mma_k" not in t,
        "direct in slices": not implicit and t.get("split", "none") != "none",
        "padding of one side": any(before != behind for before, behind in p.padding),
        "dilation with groups": p.groups > 1 and max(p.dilation) > 1, "a multiplier": p.groups == p.c < p.k,
        "a stride that leaves elements": left(p), "float32 of halves": p.dtype != "float32" == p.out_dtype,
    }  # fmt: skip
    counts.update(name for name, true in about.items() if true)
    return counts


# What a case's number decides nearly as often as it goes round, the rest at about a third of how often it comes up.
SPREAD = {
    "target sm_80": 25, "target sm_90a": 25, "target sm_75": 10, "layout nhwc": 40, "layout nchw": 40,
    "inputs float32": 40, "inputs float16": 20, "inputs bfloat16": 20, "out float32": 10, "out float16": 8,
    "out bfloat16": 8, "algorithm implicit_gemm": 25, "algorithm direct": 15, "tensor cores": 15, "CUDA cores": 5,
    "split none": 5, "split workspace": 3, "split atomic": 2, "split stream": 1, "copy cp_async": 3,
    "copy registers": 8, "pointwise": 8, "depthwise": 8, "groups": 15, "dense": 15, "stride": 25, "no stride": 10,
    "dilation": 20, "no dilation": 15, "padding": 25, "no padding": 10, "several images": 20, "one image": 20,
    "dilation with groups": 8, "a multiplier": 5, "a stride that leaves elements": 8, "padding of one side": 12,
    "0 or more nodes": 10, "1 or more nodes": 10, "2 or more nodes": 30,
}  # fmt: skip
SPREAD_OF_IMAGES = {
    **SPREAD, "align_x 1": 15, "align_x 8": 1, "align_out 1": 10, "align_out 8": 1, "window 0": 6, "window 3": 2,
    "window 5": 2, "window 7": 2,
}  # fmt: skip


def random_cases(name: str, spread: dict[str, int], *, about: Any = properties) -> RandomCases:
    return RandomCases(cases=partial(random_convolutions, name=name), properties=about, spread=spread, each_run=13)


def gathered_beside_stored(name: str, fields: Fields) -> dict[str, Kernel]:
    """A 3 x 3 and, in its tiles, the 1 x 1, which gathers nothing."""
    gathered = level_0(name, **fields)
    stored = operator(name).candidate(convolution(name, **{**fields, **POINT}), gathered.schedule)
    return {"fp16 3x3": gathered.kernel, "fp16 1x1 in the tiles of the 3x3": stored.kernel}


COMPARED = ("fp16 3x3", "fp16 1x1 in the tiles of the 3x3")


def require_no_branches(codes: Codes) -> None:
    """A branch for each vector would keep the copies from being started together."""
    gathered, stored = (codes[name][1].count("bra") for name in COMPARED)
    assert 0 < gathered <= stored + 1


def left(p: Convolution) -> bool:
    """Whether a stride leaves elements behind the last window."""
    windows = (p.dilation[axis] * (taps - 1) + 1 for axis, taps in enumerate((p.r, p.s)))
    return any((p.padded[axis] - window) % p.stride[axis] for axis, window in enumerate(windows))


def begun(name: str, layers: Sequence[tuple[int, ...]], few: Any) -> list[tuple[str, Fields, str]]:
    """`layers`: c, k, groups, taps and stride. `few`: of a layer, whether even sm_75 computes it in bfloat16."""
    return [
        (
            arch,
            {"h": 17, "w": 19, "c": c, "k": k, "groups": groups, "r": r, "s": r, "padding": r // 2, "layout": layout,
             "dtype": dtype, "stride": stride},
            "needs sm_80" if dtype == "bfloat16" and arch == "sm_75" and not few(c, k, groups) else "",
        )
        for c, k, groups, r, stride in layers
        for layout in LAYOUTS
        for dtype in ("float32", "float16", "bfloat16")
        for arch in ("sm_75", "sm_80", "sm_90a")
    ]  # fmt: skip
