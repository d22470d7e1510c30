#!/usr/bin/env python3
"""Times other implementations of the release's operators on one NVIDIA GPU, with stock PyTorch and Triton alone.

  python3 tools/peers.py                               every operator, Markdown tables
  python3 tools/peers.py --ops dense,experts --rows 1,6,16 --output FILE    some, with a JSON record a line
  python3 tools/peers.py --seconds 150                 ends in about that time, and says what it left out
  TRITON_INTERPRET=1 python3 tools/peers.py --selftest      tiny shapes, right or wrong only; needs no GPU

Method, as that of tf-cuda-check: weight sets of more than four times the second-level cache are used in turn, the turn is
captured as a CUDA graph and replayed, and the figure is the median replay by the number of calls. Inputs are random, since zeros
raise clocks. A peer's inputs have the form that it wants, made before and not timed: FP8 where it multiplies FP8, the sorted
lists of picks where it multiplies by expert. Each peer is also asked whether its first row has the same bits alone as among all
rows. `layer` chains the quickest peer of each operator in one graph, with nothing between them. A peer that this build of
PyTorch or Triton doesn't support is reported as such and ends nothing.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
import warnings

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
# The interpreter has no bf16 arithmetic.
MULTIPLIED = tl.float32 if INTERPRETED else tl.bfloat16
BYTES_A_SECOND, OPERATIONS_A_SECOND, CACHE_BYTES = 4.3e12, 790e12, 60 << 20
PROMPT_ROWS = 2048
ALL_OPS = "ceilings,dense,experts,head,attention,hyper,index,layer"
CLAMP = tl.constexpr(10.0)


@dataclasses.dataclass(frozen=True)
class Sizes:
    hidden: int = 5120
    heads: int = 64
    head_dim: int = 512
    inner: int = 2304
    experts: int = 384
    picks: int = 6
    vocabulary: int = 129280
    keys: int = 640
    # Stands in the second-level cache, as the cache of our own measurement does.
    cached: int = 4096
    index_heads: int = 32
    index_dim: int = 128
    entries: int = 32768
    selected: int = 512
    # Name, groups, rows of a group's weight, columns, FP8 or bf16.
    dense: tuple = (
        ("wq_a+wkv", 1, 1792, 5120, True),
        ("wq_b", 1, 32768, 1280, True),
        ("wo_a", 8, 1024, 4096, True),
        ("wo_b", 1, 5120, 8192, True),
        ("shared w2", 1, 5120, 2304, True),
        ("index wq_b", 1, 4096, 1280, True),
        ("engram wkv", 1, 25600, 6144, True),
        ("main_proj", 1, 5120, 15360, True),
        ("router", 1, 384, 5120, False),
        ("compressor", 1, 1024, 5120, False),
    )


TINY = Sizes(
    hidden=256,
    heads=16,
    head_dim=32,
    inner=128,
    experts=8,
    picks=2,
    vocabulary=256,
    keys=48,
    cached=64,
    index_heads=2,
    index_dim=32,
    entries=64,
    selected=16,
    dense=(
        ("wq_a+wkv", 1, 128, 256, True),
        ("wq_b", 1, 256, 256, True),
        ("wo_a", 2, 64, 256, True),
        ("wo_b", 1, 256, 512, True),
        ("router", 1, 64, 256, False),
    ),
)


# ---------------------------------------------------------------- timing
def timed(calls, replays=20, warm=3):
    """Median seconds of a call: `calls` in order in one CUDA graph, replayed."""
    if not CUDA:
        for call in calls:
            call()
        return 1.0
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compiles, and lets libraries take their working memory.
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(warm):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    samples = []
    for _ in range(replays):
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        samples.append(events[0].elapsed_time(events[1]) * 1e-3 / len(calls))
    return statistics.median(samples)


def copies_of(size):
    return max(2, min(64, math.ceil(4 * CACHE_BYTES / size))) if CUDA else 2


def calls_for(rows, copies):
    """How many calls a graph has: whole turns, sixteen or more of few rows."""
    least = 4 if rows > 128 else 16
    return copies * math.ceil(least / copies) if CUDA else 1


def compiled(function):
    return torch.compile(function, dynamic=False, fullgraph=True) if CUDA else function


class OutOfTime(Exception):
    pass


class Bench:
    """What was measured, and until when more may be."""

    def __init__(self, sizes, rows, output=None, seconds=None, met=None):
        self.sizes, self.rows = sizes, rows
        # Distinct experts by rows, for the layer.
        self.met = met or {}
        self.output = open(output, "w") if output else None
        self.started, self.seconds = time.time(), seconds
        self.reserve = 0
        self.best = {}
        self.chosen = {}

    def elapsed(self):
        return time.time() - self.started

    def check_time(self):
        if self.seconds is not None and self.elapsed() > self.seconds - self.reserve:
            raise OutOfTime

    def record(self, **fields):
        if self.output:
            print(json.dumps(fields), file=self.output, flush=True)

    def report(self, op, peer, rows, seconds, size, operations, invariant, **more):
        floor = max(size / BYTES_A_SECOND, operations / OPERATIONS_A_SECOND)
        us, floor_us = seconds * 1e6, floor * 1e6
        print(f"| {op} | {peer} | {rows} | {us:.2f} | {floor_us:.2f} | {floor / seconds:.2f} | {invariant} |", flush=True)
        fields = {"op": op, "peer": peer, "rows": rows, "us": us, "floor_us": floor_us}
        self.record(**fields, fraction_of_floor=floor / seconds, row_invariant=invariant, **more)

    def refuse(self, op, peer, rows, error):
        text = (str(error).splitlines() or [""])[0][:90]
        print(f"| {op} | {peer} | {rows} | unsupported: {type(error).__name__}: {text} | | | |", flush=True)
        self.record(op=op, peer=peer, rows=rows, unsupported=f"{type(error).__name__}: {text}")

    def measure(self, op, peer, rows, work, prepare, call, copies):
        """`prepare(rows)` makes the inputs, the first row always the same; `call(inputs, turn)` gives rows first."""
        self.check_time()
        try:
            inputs = prepare(rows)
            calls = [lambda turn=turn: call(inputs, turn % copies) for turn in range(calls_for(rows, copies))]
            seconds = timed(calls)
        except Exception as error:  # noqa: BLE001 - a peer may be unsupported by this build
            self.refuse(op, peer, rows, error)
            return
        try:
            # One row is held against sixteen.
            few, many = (1, rows) if rows > 1 else (1, 16)
            invariant = same_first_row(call(prepare(few), 0), call(prepare(many), 0))
        except Exception:  # noqa: BLE001 - not for so few rows
            invariant = "one row unsupported"
        self.report(op, peer, rows, seconds, *work, invariant)
        if (op, rows) not in self.best or seconds < self.best[op, rows][0]:
            self.best[op, rows] = (seconds, peer, calls, *work)

    def tuned(self, key, configurations, calls):
        """The quickest configuration of a Triton kernel for one size of tile; `calls(configuration)` uses it."""
        if key not in self.chosen:
            found = []
            for configuration in configurations:
                self.check_time()
                try:
                    found.append((timed(calls(configuration), replays=5, warm=1), configuration))
                except Exception as error:  # noqa: BLE001 - too large for this GPU, say
                    print(f"({key}: {configuration} left out: {type(error).__name__})", flush=True)
            self.chosen[key] = min(found)[1] if found else configurations[0]
        return self.chosen[key]


def same_first_row(few, many):
    few, many = [out if isinstance(out, tuple) else (out,) for out in (few, many)]
    bits = [[out[:1].contiguous().view(torch.uint8) for out in pair] for pair in zip(few, many)]
    return "yes" if all(torch.equal(a, b) for a, b in bits) else "no"


# ---------------------------------------------------------------- formats
def random_fp8(rows, columns):
    """Finite e4m3 codes."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=DEVICE)
    return torch.where((codes & 0x7F) == 0x7F, codes - 1, codes).view(torch.float8_e4m3fn)


def random_scales(*shape):
    return torch.randint(116, 123, shape, dtype=torch.uint8, device=DEVICE)


def random_bf16(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def dequantised_fp8(codes, scales):
    factors = torch.exp2(scales.float() - 127)
    return (codes.float() * factors.repeat_interleave(32, 0).repeat_interleave(32, 1)).to(torch.bfloat16)


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def dequantised_fp4(codes, scales):
    """[.., rows, columns / 2] bytes; in each group of 32 columns byte j holds element j (low) and j + 16 (high).
    A repacked order, for timing; the release puts neighbours 2k and 2k+1 into one byte."""
    table = torch.tensor(E2M1, device=codes.device)
    groups = codes.unflatten(-1, (-1, 16))
    values = torch.cat((table[(groups & 15).long()], table[(groups >> 4).long()]), -1)
    return (values * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


# ---------------------------------------------------------------- Triton peers
@triton.jit(do_not_specialize=["rows"])
def w8a16_kernel(
    x,
    codes,
    scales,
    out,
    rows,
    outputs,
    columns,
    GROUPS: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TYPE: tl.constexpr,
):
    """out[split, row, group, output] of x [rows, groups, columns] by FP8 weights [groups, outputs, columns]."""
    part = tl.program_id(2) % SPLIT
    group = tl.program_id(2) // SPLIT
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    output = group * outputs + tl.program_id(0) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    here = columns // SPLIT
    for first in range(part * here, part * here + here, BK):
        column = first + tl.arange(0, BK)
        at = row[:, None] * (GROUPS * columns) + group * columns + column[None, :]
        values = tl.load(x + at, mask=row[:, None] < rows, other=0.0).to(TYPE)
        weights = tl.load(codes + output[:, None] * columns + column[None, :]).to(TYPE)
        block = first // 32 + tl.arange(0, BK // 32)
        code = tl.load(scales + (output[:, None] // 32) * (columns // 32) + block[None, :]).to(tl.int32)
        factor = ((code << 23).to(tl.float32, bitcast=True)).to(TYPE)
        factor = tl.broadcast_to(factor[:, :, None], (BN, BK // 32, 32)).reshape(BN, BK)
        sums = tl.dot(values, tl.trans(weights * factor), sums)
    place = part * rows * GROUPS * outputs + row[:, None] * (GROUPS * outputs) + output[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=row[:, None] < rows)


def w8a16(x, codes, scales, groups, configuration):
    bm, bn, bk, split, warps, stages = configuration
    rows, outputs, columns = x.shape[0], codes.shape[0] // groups, codes.shape[1]
    kind = torch.bfloat16 if split == 1 else torch.float32
    out = torch.empty((split, rows, groups * outputs), dtype=kind, device=x.device)
    grid = (outputs // bn, triton.cdiv(rows, bm), split * groups)
    w8a16_kernel[grid](
        x, codes, scales, out, rows, outputs, columns, groups, split, bm, bn, bk, MULTIPLIED,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out[0] if split == 1 else out.sum(0).to(torch.bfloat16)


@triton.jit
def e2m1_select(code):
    magnitude = code & 7
    bits = tl.where(magnitude == 0, 0, tl.where(magnitude == 1, 0x3F00, (magnitude << 6) + 0x3F00))
    return (bits | ((code & 8) << 12)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e2m1(code, TYPE: tl.constexpr):
    if TYPE == tl.float32:  # the interpreter flushes bf16 subnormals
        return e2m1_select(code).to(TYPE)
    # The sign to bit 15, three bits of magnitude to 8..6; times 2^126 rebiases exactly.
    bits = (((code & 8) << 12) | ((code & 7) << 6)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return (bits * 8.507059173023462e37).to(TYPE)


@triton.jit
def mxfp4_kernel(
    x,
    codes,
    scales,
    out,
    pair_row,
    pair_start,
    active,
    active_count,
    outputs,
    columns,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Pairs pair_start[a] to pair_start[a + 1] of the sorted list by the weights of expert active[a]."""
    tile, place = tl.program_id(0), tl.program_id(1)
    if place < tl.load(active_count):
        expert = tl.load(active + place).to(tl.int64)
        first, end = tl.load(pair_start + place), tl.load(pair_start + place + 1)
        output = expert * outputs + tile * BN + tl.arange(0, BN)
        GROUPS: tl.constexpr = BK // 32
        byte = tl.arange(0, BK // 2)
        while first < end:
            pair = first + tl.arange(0, BM)
            row = tl.load(pair_row + pair, mask=pair < end, other=0)
            sums = tl.zeros((BM, BN), dtype=tl.float32)
            for k in range(0, columns, BK):
                packed = tl.load(codes + output[:, None] * (columns // 2) + k // 2 + byte[None, :]).to(tl.int16)
                block = k // 32 + tl.arange(0, GROUPS)
                code = tl.load(scales + output[:, None] * (columns // 32) + block[None, :]).to(tl.int32)
                factor = ((code << 23).to(tl.float32, bitcast=True)).to(TYPE)
                factor = tl.broadcast_to(factor[:, :, None], (BN, GROUPS, 16)).reshape(BN, BK // 2)
                low, high = e2m1(packed & 15, TYPE), e2m1(packed >> 4, TYPE)
                column = row[:, None] * columns + k + (byte // 16 * 32 + byte % 16)[None, :]
                held = pair[:, None] < end
                values = tl.load(x + column, mask=held, other=0.0).to(TYPE)
                sums = tl.dot(values, tl.trans(low * factor), sums)
                values = tl.load(x + column + 16, mask=held, other=0.0).to(TYPE)
                sums = tl.dot(values, tl.trans(high * factor), sums)
            at = pair[:, None].to(tl.int64) * outputs + tile * BN + tl.arange(0, BN)[None, :]
            tl.store(out + at, sums.to(tl.bfloat16), mask=pair[:, None] < end)
            first += BM


def mxfp4_grouped(x, codes, scales, rows_of_pairs, lists, configuration):
    bm, bn, bk, warps, stages = configuration
    experts, outputs, half = codes.shape
    out = torch.empty((rows_of_pairs.numel(), outputs), dtype=torch.bfloat16, device=x.device)
    mxfp4_kernel[(outputs // bn, min(experts, rows_of_pairs.numel()))](
        x, codes, scales, out, rows_of_pairs, lists["start"], lists["active"], lists["active_count"],
        outputs, half * 2, bm, bn, bk, MULTIPLIED, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit
def activation_kernel(up, out, inner, COUNT: tl.constexpr):
    """silu(gate) * up of [rows, 2, inner]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    held = column < inner
    gate = tl.load(up + row * 2 * inner + column, mask=held, other=0.0).to(tl.float32)
    value = tl.load(up + row * 2 * inner + inner + column, mask=held, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, CLAMP)
    value = tl.maximum(tl.minimum(value, CLAMP), -CLAMP)
    result = gate / (1 + tl.exp(-gate)) * value
    tl.store(out + row * inner + column, result.to(out.dtype.element_ty), mask=held)


def activated(up, kind=torch.bfloat16):
    rows, inner = up.shape[0], up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=kind, device=up.device)
    activation_kernel[(rows, triton.cdiv(inner, 1024))](up, out, inner, 1024)
    return out


@triton.jit
def mixture_kernel(pairs, place, weight, shared, out, columns, PICKS: tl.constexpr, COUNT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    held = column < columns
    total = tl.load(shared + row * columns + column, mask=held, other=0.0).to(tl.float32)
    for pick in tl.static_range(PICKS):
        at = tl.load(place + row * PICKS + pick).to(tl.int64) * columns
        value = tl.load(pairs + at + column, mask=held, other=0.0).to(tl.float32)
        total += value * tl.load(weight + row * PICKS + pick)
    tl.store(out + row * columns + column, total.to(tl.bfloat16), mask=held)


def mixed(pairs, lists, weight, shared):
    rows, columns = shared.shape
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=pairs.device)
    mixture_kernel[(rows, triton.cdiv(columns, 1024))](
        pairs, lists["place"], weight, shared, out, columns, weight.shape[1], 1024
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(
    x,
    w,
    out,
    rows,
    outputs,
    columns,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TYPE: tl.constexpr,
):
    """The published batch-invariant recipe: one tile for every number of rows, columns never cut."""
    group = tl.program_id(2)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    local = tl.program_id(0) * BN + tl.arange(0, BN)
    output = group * outputs + local
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, columns, BK):
        column = first + tl.arange(0, BK)
        at = row[:, None] * (GROUPS * columns) + group * columns + column[None, :]
        values = tl.load(x + at, mask=row[:, None] < rows, other=0.0).to(TYPE)
        weights = tl.load(w + output[:, None] * columns + column[None, :], mask=local[:, None] < outputs, other=0.0)
        sums = tl.dot(values, tl.trans(weights.to(TYPE)), sums)
    held = (row[:, None] < rows) & (local[None, :] < outputs)
    tl.store(out + row[:, None] * (GROUPS * outputs) + output[None, :], sums.to(tl.bfloat16), mask=held)


def one_tile(x, w, groups):
    rows, outputs, columns = x.shape[0], w.shape[0] // groups, w.shape[1]
    out = torch.empty((rows, groups * outputs), dtype=torch.bfloat16, device=x.device)
    grid = (triton.cdiv(outputs, 128), triton.cdiv(rows, 128), groups)
    tile_kernel[grid](x, w, out, rows, outputs, columns, groups, 128, 128, 64, MULTIPLIED, num_warps=8, num_stages=3)
    return out


def bucket(rows):
    """Rows of a Triton tile."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128


# ---------------------------------------------------------------- operators
def op_ceilings(bench):
    if not CUDA:
        return
    count = 1 << 30
    source = torch.randn(count // 4, device=DEVICE)
    target = torch.empty_like(source)
    square = [random_bf16(8192, 8192) for _ in range(2)]
    codes = [random_fp8(8192, 8192) for _ in range(2)]
    one, zero = torch.ones((), device=DEVICE), torch.zeros(1, device=DEVICE)
    operations = 2 * 8192**3

    def fp8():
        return torch._scaled_mm(codes[0], codes[1].T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    measures = [
        ("copy", "TB/s", 2 * count / 1e12, [lambda: torch.neg(source, out=target)]),
        ("read (a sum)", "TB/s", count / 1e12, [lambda: source.sum()]),
        ("bf16 matmul of 8192", "TFLOP/s", operations / 1e12, [lambda: square[0] @ square[1]]),
        ("FP8 matmul of 8192", "TFLOP/s", operations / 1e12, [fp8]),
        ("a kernel that waits for the one before", "us", None, [lambda: zero.add_(1)] * 200),
    ]
    print("| ceiling | value |\n| --- | --- |")
    for name, unit, amount, calls in measures:
        seconds = timed(calls)
        value = seconds * 1e6 if amount is None else amount / seconds
        print(f"| {name} | {value:.2f} {unit} |", flush=True)
        bench.record(ceiling=name, value=value, unit=unit)


SMALL = [(64, 128, 1, 4, 4), (32, 128, 1, 4, 5), (64, 128, 2, 4, 4), (32, 256, 4, 4, 3)]
SMALL += [(64, 64, 4, 4, 5), (32, 128, 8, 4, 4)]
LARGE = [(64, 128, 1, 4, 3), (128, 64, 1, 4, 4), (128, 64, 1, 8, 4), (128, 128, 1, 8, 3)]


def dense_peers(bench, name, groups, outputs, columns, codes, scales, wide):
    """Name and call of each peer; inputs are x, x as FP8, x as FP8 by group, scales of x's blocks."""
    one = torch.ones((), device=DEVICE)
    bf16 = torch.bfloat16
    half = len(wide)

    def cublas(inputs, turn):
        x, w = inputs[0], wide[turn % half]
        if groups == 1:
            return x @ w.T
        by_group = x.view(-1, groups, columns).transpose(0, 1)
        return torch.bmm(by_group, w.view(groups, outputs, columns).transpose(1, 2)).transpose(0, 1)

    yield "cuBLAS bf16", cublas
    yield "Triton bf16, one tile for all rows", lambda inputs, turn: one_tile(inputs[0], wide[turn % half], groups)
    if codes is None:
        return

    def cublaslt(fast):
        def call(inputs, turn):
            w = codes[turn].T
            return torch._scaled_mm(inputs[1], w, scale_a=one, scale_b=one, out_dtype=bf16, use_fast_accum=fast)

        return call

    def blocks(inputs, turn):
        return torch._scaled_mm(inputs[1], codes[turn].T, scale_a=inputs[3], scale_b=factors, out_dtype=bf16)

    def grouped(inputs, turn):
        w = codes[turn].view(groups, outputs, columns).transpose(1, 2)
        rows = torch.ones(groups, inputs[2].shape[1], device=DEVICE)
        out = torch._scaled_grouped_mm(inputs[2], w, scale_a=rows, scale_b=by_output, out_dtype=bf16)
        return out.transpose(0, 1)

    if groups == 1:
        factors = torch.rand(columns // 128, outputs // 128, device=DEVICE).T.contiguous().T + 0.5
        yield "cuBLASLt FP8, one scale", cublaslt(False)
        yield "cuBLASLt FP8, one scale, quick sums", cublaslt(True)
        yield "cuBLASLt FP8, blocks of 128", blocks
    else:
        by_output = torch.ones(groups, outputs, device=DEVICE)
        yield "grouped FP8, a scale a row", grouped

    def triton_fp8(inputs, turn):
        x = inputs[0]
        tile = bucket(x.shape[0])
        shapes = [(tile, *rest) for rest in (SMALL if tile < 64 else LARGE)]
        fitting = [
            (bm, bn, bk, split, *rest)
            for bm, bn, bk, split, *rest in shapes
            if outputs % bn == 0 and columns % (split * bk) == 0
        ]
        turns = range(min(len(codes), 16))
        chosen = bench.tuned(
            (name, tile), fitting, lambda c: [lambda i=i: w8a16(x, codes[i], scales[i], groups, c) for i in turns]
        )
        return w8a16(x, codes[turn], scales[turn], groups, chosen)

    yield "Triton W8A16, 32x32 scales", triton_fp8


def op_dense(bench):
    for name, groups, outputs, columns, is_fp8 in bench.sizes.dense:
        bench.check_time()
        weight_rows = groups * outputs
        size = weight_rows * columns * (1 + 1 / 1024 if is_fp8 else 2)
        copies = copies_of(size)
        codes = scales = None
        if is_fp8:
            codes = [random_fp8(weight_rows, columns) for _ in range(copies)]
            scales = [random_scales(weight_rows // 32, columns // 32) for _ in range(copies)]
            wide = [dequantised_fp8(codes[i], scales[i]) for i in range(max(2, copies // 2))]
        else:
            wide = [random_bf16(weight_rows, columns) for _ in range(copies)]
        x = random_bf16(max(*bench.rows, PROMPT_ROWS if CUDA else 16), groups * columns)
        x8 = x.to(torch.float8_e4m3fn)

        def prepare(rows):
            by_group = x8[:rows].view(rows, groups, columns).transpose(0, 1).contiguous()
            of_blocks = torch.ones(max(columns // 128, 1), rows, device=DEVICE).T
            return x[:rows], x8[:rows], by_group, of_blocks

        peers = list(dense_peers(bench, name, groups, outputs, columns, codes, scales, wide))
        for rows in bench.rows:
            for peer, call in peers:
                # Tuning captures graphs of its own, so it comes before.
                if peer.startswith("Triton W8A16"):
                    try:
                        call(prepare(rows), 0)
                    except OutOfTime:
                        raise
                    except Exception:  # noqa: BLE001 - said where it is measured
                        pass
                work = (size, 2 * rows * weight_rows * columns)
                bench.measure(name, peer, rows, work, prepare, call, copies)


def routed_lists(picks, experts):
    """Of picks [rows, k]: the sorted pairs' rows, where each pair lies, the experts met and where theirs start."""
    flat = picks.flatten()
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=experts)
    met = counts > 0
    active = torch.cat((met.nonzero().flatten(), (~met).nonzero().flatten()))
    start = torch.cat((torch.zeros(1, dtype=torch.int64, device=picks.device), counts[active].cumsum(0)))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=picks.device)
    lists = {
        "row": order // picks.shape[1],
        "pair": torch.arange(order.numel(), device=picks.device),
        "place": place,
        "start": start,
        "active": active,
        "active_count": met.sum().reshape(1),
        "offsets": counts.cumsum(0),
    }
    return {name: values.to(torch.int32) for name, values in lists.items()} | {"row_long": lists["row"]}


FEW_PAIRS = [(16, 64, 128, 4, 3), (16, 32, 128, 4, 4), (16, 64, 256, 4, 2), (16, 128, 128, 8, 3), (16, 32, 256, 4, 3)]
MANY_PAIRS = [(16, 64, 128, 4, 3), (32, 64, 128, 4, 3), (64, 64, 128, 4, 3), (64, 128, 64, 8, 3)]


def drawn_picks(bench, turns, rows, met=None):
    """[turn, row, pick], drawn from all experts or from so many that about `met` of them are met."""
    experts, picks = bench.sizes.experts, bench.sizes.picks
    scores = torch.rand(turns, rows, experts, device=DEVICE)
    if met is not None:
        expected = lambda pool: pool * (1 - (1 - picks / pool) ** rows)  # noqa: E731
        pool = next((pool for pool in range(picks, experts) if expected(pool) >= met), experts)
        for turn in range(turns):
            scores[turn, :, torch.randperm(experts, device=DEVICE)[pool:]] = -1.0
    return scores.topk(picks, dim=-1).indices


def op_experts(bench):
    hidden, inner, experts = bench.sizes.hidden, bench.sizes.inner, bench.sizes.experts
    turns, expert_bytes = 8 if CUDA else 2, 3 * inner * hidden * (0.5 + 1 / 32)
    shared_bytes = 3 * inner * hidden * (1 + 1 / 1024)
    most = max(*bench.rows, 16)
    x = random_bf16(most, hidden)
    x8 = x.to(torch.float8_e4m3fn)
    weight = torch.rand(most, bench.sizes.picks, device=DEVICE)
    random_picks = drawn_picks(bench, turns, most)
    one = torch.ones((), device=DEVICE)
    shared_up, shared_down = random_fp8(2 * inner, hidden), random_fp8(hidden, inner)

    def prepare_with(picks):
        def prepare(rows):
            lists = [routed_lists(picks[turn, :rows], experts) for turn in range(turns)]
            return x[:rows], x8[:rows], weight[:rows], lists

        return prepare

    def shared(x8):
        scaled = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        up = torch._scaled_mm(x8, shared_up.T, **scaled)
        return torch._scaled_mm(activated(up, torch.float8_e4m3fn), shared_down.T, **scaled)

    def work(rows, picks):
        distinct = statistics.mean(float(picks[turn, :rows].unique().numel()) for turn in range(turns))
        size = distinct * expert_bytes + shared_bytes
        return size, 6 * rows * (bench.sizes.picks + 1) * inner * hidden

    up = torch.randint(0, 256, (experts, 2 * inner, hidden // 2), dtype=torch.uint8, device=DEVICE)
    down = torch.randint(0, 256, (experts, hidden, inner // 2), dtype=torch.uint8, device=DEVICE)
    up_scales, down_scales = random_scales(experts, 2 * inner, hidden // 32), random_scales(experts, hidden, inner // 32)

    def mixture(inputs, turn, configuration):
        x, x8, weight, lists = inputs[0], inputs[1], inputs[2], inputs[3][turn]
        pairs = mxfp4_grouped(x, up, up_scales, lists["row"], lists, configuration)
        pairs = mxfp4_grouped(activated(pairs), down, down_scales, lists["pair"], lists, configuration)
        return mixed(pairs, lists, weight, shared(x8))

    def tuned_mixture(rows, inputs):
        bench.check_time()
        key = ("experts", 8 if rows <= 8 else 16 if rows <= 128 else 64)
        calls = lambda c: [lambda turn=turn: mixture(inputs, turn, c) for turn in range(turns)]  # noqa: E731
        chosen = bench.tuned(key, FEW_PAIRS if rows <= 128 else MANY_PAIRS, calls)
        return lambda inputs, turn: mixture(inputs, turn, chosen)

    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    wide_up = torch.empty(experts, 2 * inner, hidden, device=DEVICE, dtype=torch.bfloat16).normal_(0, 0.02)
    wide_down = torch.empty(experts, hidden, inner, device=DEVICE, dtype=torch.bfloat16).normal_(0, 0.02)

    def wide(inputs, turn):
        x, x8, weight, lists = inputs[0], inputs[1], inputs[2], inputs[3][turn]
        pairs = grouped_mm(x[lists["row_long"]], wide_up.transpose(1, 2), offs=lists["offsets"])
        pairs = grouped_mm(activated(pairs), wide_down.transpose(1, 2), offs=lists["offsets"])
        return mixed(pairs, lists, weight, shared(x8))

    for rows in bench.rows:
        routings = [("experts", random_picks)]
        if rows in bench.met:
            routings.append(("experts, as in the slice", drawn_picks(bench, turns, max(rows, 16), bench.met[rows])))
        for op, picks in routings:
            prepare = prepare_with(picks)
            peers = {
                "Triton MXFP4, grouped": tuned_mixture(rows, prepare(rows)),
                "PyTorch grouped_mm bf16": wide,
            }
            for peer, call in peers.items():
                bench.measure(op, peer, rows, work(rows, picks), prepare, call, turns)


def op_head(bench):
    vocabulary, hidden = bench.sizes.vocabulary, bench.sizes.hidden
    w = random_bf16(vocabulary, hidden) * 0.02
    x = random_bf16(max(*bench.rows, 16), hidden)
    for rows in [rows for rows in bench.rows if rows <= 128]:
        work = (vocabulary * hidden * 2, 2 * rows * vocabulary * hidden)
        calls = {
            ("head", "cuBLAS bf16"): lambda inputs, _: inputs @ w.T,
            ("head", "Triton bf16, one tile for all rows"): lambda inputs, _: one_tile(inputs, w, 1),
            ("head + argmax", "cuBLAS bf16"): lambda inputs, _: (inputs @ w.T).argmax(-1),
        }
        for (op, peer), call in calls.items():
            bench.measure(op, peer, rows, work, lambda rows: x[:rows], call, 1)


def attention_peers(bench):
    sizes = bench.sizes
    heads, head_dim, scale = sizes.heads, sizes.head_dim, sizes.head_dim**-0.5
    cache = random_bf16(sizes.cached, head_dim)
    sink = torch.randn(heads, device=DEVICE)
    # The sink as a key: no product with a query, no value, but a bias of its own for each head.
    with_sink = torch.cat((cache, torch.zeros(1, head_dim, device=DEVICE, dtype=torch.bfloat16)))
    bias = torch.zeros(1, 1, heads, (sizes.keys + 8) // 8 * 8, device=DEVICE, dtype=torch.bfloat16)
    bias[..., sizes.keys] = sink.to(torch.bfloat16)
    bias = bias[..., : sizes.keys + 1]

    def reference(q, index):
        keys = cache[index]
        scores = torch.einsum("rhd,rkd->rhk", q, keys).float() * scale
        most = torch.maximum(scores.amax(-1, keepdim=True), sink[None, :, None])
        weights = torch.exp(scores - most)
        out = torch.einsum("rhk,rkd->rhd", weights.to(torch.bfloat16), keys).float()
        total = weights.sum(-1, keepdim=True) + torch.exp(sink[None, :, None] - most)
        return (out / total).to(torch.bfloat16)

    def gathered(q, index):
        """All heads have the same keys: they are the queries of one head."""
        keys = with_sink[F.pad(index, (0, 1), value=sizes.cached)].unsqueeze(1)
        return F.scaled_dot_product_attention(q.unsqueeze(1), keys, keys, attn_mask=bias, scale=scale).squeeze(1)

    return {"gather and SDPA, the sink a key": gathered, "torch.compile": compiled(reference)}


def op_attention(bench):
    sizes, turns = bench.sizes, 8 if CUDA else 2
    most = max(*bench.rows, 16)
    q = random_bf16(most, sizes.heads, sizes.head_dim)
    indices = torch.randint(0, sizes.cached, (turns, most, sizes.keys), device=DEVICE)
    for peer, attend in attention_peers(bench).items():
        for rows in bench.rows:
            # A key is 288 or 528 bytes as it is stored, 336 in the mean.
            size = rows * (sizes.keys * 336 + 8 * sizes.heads * sizes.head_dim)
            operations = 4 * rows * sizes.heads * sizes.keys * sizes.head_dim
            bench.measure(
                "attention",
                peer,
                rows,
                (size, operations),
                lambda rows: (q[:rows], [index[:rows] for index in indices]),
                lambda inputs, turn, attend=attend: attend(inputs[0], inputs[1][turn]),
                turns,
            )


def op_index(bench):
    """Scores of every entry, and the largest 512."""
    sizes = bench.sizes
    keys = random_bf16(sizes.entries, sizes.index_dim)
    q = random_bf16(16, sizes.index_heads, sizes.index_dim)
    weight = torch.randn(16, sizes.index_heads, device=DEVICE)

    def scores(q, weight):
        return torch.einsum("rhd,kd->rhk", q, keys).relu().float().mul(weight[..., None]).sum(1)

    score = compiled(scores)
    for rows in [rows for rows in bench.rows if rows <= 16]:
        operations = 2 * rows * sizes.index_heads * sizes.index_dim * sizes.entries
        peers = {
            "index scores": lambda inputs, _: score(*inputs),
            "index select": lambda inputs, _: score(*inputs).topk(sizes.selected, sorted=False).indices,
        }
        for op, call in peers.items():
            prepare = lambda rows: (q[:rows], weight[:rows])  # noqa: E731
            peer = "torch.compile" if op == "index scores" else "torch.compile and topk"
            bench.measure(op, peer, rows, (sizes.entries * 72, operations), prepare, call, 1)


def op_hyper(bench):
    """The end of one sublayer and the start of the next: streams, mixes, and the normed input."""
    hidden = bench.sizes.hidden
    function = torch.randn(24, 4 * hidden, device=DEVICE) * 0.01
    base, norm = torch.zeros(24, device=DEVICE), torch.ones(hidden, device=DEVICE, dtype=torch.bfloat16)

    def enter(streams, y, post, comb, pre):
        streams = post[..., None] * y.float()[:, None] + torch.einsum("rij,rid->rjd", comb, streams.float())
        streams = streams.to(torch.bfloat16)
        flat = streams.float().flatten(1)
        mix = (flat @ function.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
        next_pre = torch.sigmoid(mix[:, :4] + base[:4]) + 1e-6
        next_post = 2 * torch.sigmoid(mix[:, 4:8])
        next_comb = torch.softmax(mix[:, 8:].view(-1, 4, 4), -1) + 1e-6
        next_comb = next_comb / (next_comb.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            next_comb = next_comb / (next_comb.sum(-1, keepdim=True) + 1e-6)
            next_comb = next_comb / (next_comb.sum(-2, keepdim=True) + 1e-6)
        x = (pre[..., None] * streams.float()).sum(1)
        x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-20)).to(torch.bfloat16) * norm
        return streams, x, next_pre, next_post, next_comb

    call = compiled(enter)
    most = max(*[rows for rows in bench.rows if rows <= 128], 16)
    inputs = (
        random_bf16(most, 4, hidden),
        random_bf16(most, hidden),
        torch.rand(most, 4, device=DEVICE),
        torch.rand(most, 4, 4, device=DEVICE),
        torch.rand(most, 4, device=DEVICE),
    )
    for rows in [rows for rows in bench.rows if rows <= 128]:
        size = rows * hidden * (4 + 4 + 1 + 1) * 2 + 24 * 4 * hidden * 4
        prepare = lambda rows: tuple(part[:rows] for part in inputs)  # noqa: E731
        bench.measure("hyper", "torch.compile", rows, (size, 0), prepare, lambda parts, _: call(*parts), 1)


LAYER = ("hyper", "wq_a+wkv", "wq_b", "attention", "wo_a", "wo_b", "hyper", "router", "experts")


def op_layer(bench):
    """The quickest peer of each operator, one behind the other, four layers a graph. Norms, rotations, roundings, stores and
    the choice of experts between them are left out, and the index."""
    for rows in [rows for rows in bench.rows if rows <= 128]:
        as_slice = ("experts, as in the slice", rows) in bench.best
        ops = [f"{op}, as in the slice" if op == "experts" and as_slice else op for op in LAYER]
        missing = sorted({op for op in ops if (op, rows) not in bench.best})
        if missing:
            print(f"(layer, {rows} rows: not without {', '.join(missing)})", flush=True)
            continue
        parts = [bench.best[op, rows] for op in ops]

        def layer(turn, parts=parts):
            for _, _, calls, *_ in parts:
                calls[turn % len(calls)]()

        try:
            seconds = timed([lambda turn=turn: layer(turn) for turn in range(4)])
        except Exception as error:  # noqa: BLE001 - said, and the others go on
            bench.refuse("layer", "the quickest of each", rows, error)
            continue
        floor = sum(max(size / BYTES_A_SECOND, operations / OPERATIONS_A_SECOND) for *_, size, operations in parts)
        chosen = {op: {"peer": part[1], "us": part[0] * 1e6} for op, part in zip(ops, parts)}
        more = {"parts": chosen, "as_slice": as_slice}
        bench.best["layer", rows] = (seconds,)
        bench.report("layer", "the quickest of each", rows, seconds, floor * BYTES_A_SECOND, 0, "-", **more)


HEADING = """
### {}

| op | peer | rows | us | floor us | of floor | row-invariant |
| --- | --- | --- | --- | --- | --- | --- |"""
# Prompts are timed too.
WITH_PROMPTS = ("dense", "experts", "attention")


def run(bench, ops):
    left_out = []
    for op in ops:
        started = time.time()
        bench.reserve = 0 if op == "layer" else 8
        row_counts = bench.rows
        if op in WITH_PROMPTS and CUDA:
            bench.rows = [*row_counts, PROMPT_ROWS]
        print(f"\n### {op}\n" if op == "ceilings" else HEADING.format(op))
        try:
            globals()["op_" + op](bench)
        except OutOfTime:
            left_out.append(op)
        bench.rows = row_counts
        seconds = time.time() - started
        print(f"\n({op}: {seconds:.0f} s{', broken off for want of time' if op in left_out else ''})", flush=True)
        bench.record(op_seconds=op, seconds=seconds, broken_off=op in left_out)
    return left_out


# ---------------------------------------------------------------- right or wrong
def near(found, expected, bound=1e-2):
    error = ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    assert error < bound, error


def selftest():
    """Each Triton kernel against plain arithmetic, then every operator's peers at tiny sizes: all must run."""
    torch.manual_seed(0)
    x = random_bf16(3, 512)
    codes, scales = random_fp8(128, 256), random_scales(4, 8)
    wide = dequantised_fp8(codes, scales).float()
    expected = torch.einsum("rgk,gnk->rgn", x.float().view(3, 2, 256), wide.view(2, 64, 256)).flatten(1)
    for split in (1, 2):
        near(w8a16(x, codes, scales, 2, (16, 32, 64, split, 4, 2)), expected)
    near(one_tile(x, wide.to(torch.bfloat16), 2), expected)
    experts, columns, outputs = 8, 128, 64
    codes = torch.randint(0, 256, (experts, outputs, columns // 2), dtype=torch.uint8, device=DEVICE)
    scales = random_scales(experts, outputs, columns // 32)
    lists = routed_lists(torch.tensor([[1, 5], [5, 2], [7, 5]], device=DEVICE), experts)
    x = random_bf16(3, columns)
    pairs = mxfp4_grouped(x, codes, scales, lists["row"], lists, (16, 32, 64, 4, 2))
    wide = dequantised_fp4(codes, scales).float()
    for (row, expert), place in zip([(0, 1), (0, 5), (1, 5), (1, 2), (2, 7), (2, 5)], lists["place"].tolist()):
        near(pairs[place], x[row].float() @ wide[expert].T)
    up = random_bf16(5, 512)
    gate, value = up[:, :256].float().clamp(max=10), up[:, 256:].float().clamp(-10, 10)
    near(activated(up), F.silu(gate) * value)
    weight, shared = torch.rand(3, 2, device=DEVICE), random_bf16(3, outputs)
    chosen = pairs[lists["place"].long()].view(3, 2, outputs).float()
    near(mixed(pairs, lists, weight, shared), (chosen * weight[..., None]).sum(1) + shared.float())
    bench = Bench(TINY, [1, 4], met={4: 3})
    met = drawn_picks(bench, 3, 4, 3)
    assert all(met[turn].unique().numel() <= 4 for turn in range(3)), met
    q = random_bf16(3, TINY.heads, TINY.head_dim)
    index = torch.randint(0, TINY.cached, (3, TINY.keys), device=DEVICE)
    found = [attend(q, index) for attend in attention_peers(bench).values()]
    near(found[0], found[1], 3e-2)
    left_out = run(bench, ALL_OPS.split(","))
    missing = [op for op in (*LAYER, "layer") for rows in bench.rows if (op, rows) not in bench.best]
    assert not left_out and not missing, (left_out, missing)
    hasty = Bench(TINY, [1], seconds=0)
    assert run(hasty, ["dense", "experts"]) == ["dense", "experts"] and not hasty.best
    print("selftest passed")


def met_in(path):
    """Distinct experts of a layer by rows; nothing where there is no such record."""
    if not path or not os.path.exists(path):
        return {}
    with open(path) as file:
        found = {row["name"]: row["samples"] for row in json.load(file)["rows"]}
    names = {rows: found.get(f"decode, {rows} rows: experts chosen") for rows in range(1, 129)}
    return {rows: statistics.median(samples) for rows, samples in names.items() if samples}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", default=ALL_OPS)
    parser.add_argument("--rows", default="1,4,6,16,32,128")
    parser.add_argument("--output", help="writes a JSON record a line to this file")
    parser.add_argument("--seconds", type=float, help="how long all of it may take, about")
    parser.add_argument("--slice", help="a record of `bench slice`: the layer meets as many experts as there")
    parser.add_argument("--selftest", action="store_true", help="right or wrong at tiny shapes")
    options = parser.parse_args()
    if options.selftest:
        return selftest()
    if not CUDA:
        sys.exit("no GPU (use TRITON_INTERPRET=1 --selftest for a correctness check)")
    torch.manual_seed(0)
    # Of the compiler about itself; the output is Markdown.
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64
    rows = [int(rows) for rows in options.rows.split(",")]
    bench = Bench(Sizes(), rows, options.output, options.seconds, met_in(options.slice))
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{machine}")
    bench.record(machine=machine, cublas=torch.version.cuda)
    left_out = run(bench, options.ops.split(","))
    if left_out:
        print(f"\nNot finished within {options.seconds:.0f} s: {', '.join(left_out)}.")


if __name__ == "__main__":
    main()
