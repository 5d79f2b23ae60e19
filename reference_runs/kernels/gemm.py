"""FP8 GEMM with fine-grained scales, promoted every 128 K: out[m, n] = sum over k of lhs[m, k] rhs[n, k].

Both operands are e4m3 with the summed dimension innermost, so the three GEMMs of a Linear y = x W^T are
one kernel:

    fprop   y [T, N]  = x [T, C] (1x128)     @ W [N, C] (128x128)          gemm(rows(x), weight)
    dgrad   dx [T, C] = dy [T, N] (1x128)    @ W^T [C, N] (128x128)        gemm(rows(dy), weight_t)
    wgrad   dW [N, C] = dy^T [N, T] (128x1)  @ x^T [C, T] (128x1)          gemm(columns(dy), columns(x))

Why promote: Hopper's tensor cores keep about 14 bits of the running sum for FP8 (DeepSeek-V3 report,
arXiv 2412.19437, 3.3.2), so after each 128 K the tile's sum is scaled and added to a float32 accumulator
in registers. The scales change at the same 128 K, so this costs no extra operation.

Order: one program computes an output tile alone and adds its K blocks in ascending order (the loop of
`accumulate_tile`); inside a block the tensor core's own fixed order holds. Nothing is added across
programs. Bits depend on the tile's shape and the warps, hence the constants.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import ScalingType, scaled_mm
from triton.tools.tensor_descriptor import TensorDescriptor

from bitcheck.reference_runs.kernels.quantise import BLOCK, Quantised

TILE_M = 64
TILE_N = 128
"""128 as well, so that a tile of the output meets one row of 128x128 scales."""
GROUP_M = 8
"""Row tiles that walk the columns together, so that the right operand's tiles stay in L2."""
NUM_WARPS = 4
NUM_STAGES = 3
ALIGNMENT = 16
"""Bytes: the copy engine wants row strides that are a multiple of this."""


@triton.jit
def accumulate_tile(
    lhs_desc, rhs_desc, lhs_scale_ptrs, rhs_scale_ptrs, lhs_row, rhs_row, block_begin, block_end,
    stride_lsb, stride_rsb,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, RHS_BY_ROW: tl.constexpr,
):  # fmt: skip
    """Return the float32 tile [TILE_M, TILE_N] of lhs @ rhs^T over K blocks block_begin .. block_end - 1.

    lhs_scale_ptrs [TILE_M] and rhs_scale_ptrs ([TILE_N] if RHS_BY_ROW, else one) point at K block 0.
    """
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for block in range(block_begin, block_end):  # K ascending: the order of the sum
        lhs = lhs_desc.load([lhs_row, block * BLOCK_K])
        rhs = rhs_desc.load([rhs_row, block * BLOCK_K])
        lhs_scale = tl.load(lhs_scale_ptrs + block * stride_lsb)
        rhs_scale = tl.load(rhs_scale_ptrs + block * stride_rsb)
        partial = tl.dot(lhs, rhs.T)
        if RHS_BY_ROW:
            total += partial * lhs_scale[:, None] * rhs_scale[None, :]
        else:
            total += partial * (lhs_scale * rhs_scale)[:, None]
    return total


@triton.jit
def _gemm_kernel(
    lhs_desc, rhs_desc, lhs_scale_ptr, rhs_scale_ptr, out_ptr, num_rows, num_cols, num_blocks,
    stride_lsr, stride_lsb, stride_rsr, stride_rsb, stride_or,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    RHS_BY_ROW: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(num_rows, TILE_M)
    tiles_n = tl.cdiv(num_cols, TILE_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    group = tl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + pid % (GROUP_M * tiles_n) % group
    tile_n = pid % (GROUP_M * tiles_n) // group

    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    cols = tile_n * TILE_N + tl.arange(0, TILE_N)
    lhs_scale_ptrs = lhs_scale_ptr + tl.minimum(rows, num_rows - 1) * stride_lsr
    if RHS_BY_ROW:
        rhs_scale_ptrs = rhs_scale_ptr + tl.minimum(cols, num_cols - 1) * stride_rsr
    else:
        rhs_scale_ptrs = rhs_scale_ptr + tile_n * stride_rsr
    out = accumulate_tile(
        lhs_desc, rhs_desc, lhs_scale_ptrs, rhs_scale_ptrs, tile_m * TILE_M, tile_n * TILE_N, 0, num_blocks,
        stride_lsb, stride_rsb, TILE_M, TILE_N, BLOCK_K, RHS_BY_ROW,
    )  # fmt: skip
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * stride_or + cols[None, :]
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    if ACCUMULATE:
        out += tl.load(out_ptrs, mask=mask, other=0.0)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def tile_descriptor(values: torch.Tensor, tile_rows: int) -> TensorDescriptor:
    """Describe `values` [..., R, C] e4m3 to the copy engine, leading dimensions flattened into rows.

    Tiles are `tile_rows` x 128; what lies past the last row or column reads as zero. Raises ValueError
    if rows are not contiguous or C is not a multiple of 16.
    """
    num_cols = values.shape[-1]
    if not values.is_contiguous() or num_cols % ALIGNMENT:
        raise ValueError(
            f"operand {tuple(values.shape)}, strides {values.stride()}: expected contiguous rows of a multiple of "
            f"{ALIGNMENT} elements; pad the summed dimension with zeros"
        )
    return TensorDescriptor.from_tensor(values.view(-1, num_cols), [tile_rows, BLOCK])


def gemm(
    lhs: Quantised, rhs: Quantised, *, out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply: `lhs` [M, K] by rows (1x128) with `rhs` [N, K] by rows or in 128x128 blocks, to [M, N].

    With `out` (float32 [M, N], rows contiguous) the product is added to it, after the sum over K.
    Raises ValueError where shapes do not fit or K is not a multiple of 16.
    """
    (num_rows, num_k), num_cols = lhs.values.shape, rhs.values.shape[0]
    if rhs.values.shape[1] != num_k or lhs.rows_per_scale != 1:
        raise ValueError(f"cannot multiply {tuple(lhs.values.shape)} by the transpose of {tuple(rhs.values.shape)}")
    accumulate = out is not None
    if out is None:
        out = torch.empty(num_rows, num_cols, dtype=out_dtype, device=lhs.values.device)
    elif out.shape != (num_rows, num_cols) or out.dtype != torch.float32 or out.stride(1) != 1:
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}; expected float32 {(num_rows, num_cols)}")
    if not out.numel():
        return out
    if not num_k:
        return out if accumulate else out.zero_()
    _gemm_kernel[(triton.cdiv(num_rows, TILE_M) * triton.cdiv(num_cols, TILE_N),)](
        tile_descriptor(lhs.values, TILE_M), tile_descriptor(rhs.values, TILE_N), lhs.scales, rhs.scales, out,
        num_rows, num_cols, triton.cdiv(num_k, BLOCK), *lhs.scales.stride(), *rhs.scales.stride(), out.stride(0),
        TILE_M=TILE_M, TILE_N=TILE_N, BLOCK_K=BLOCK, GROUP_M=GROUP_M, RHS_BY_ROW=rhs.rows_per_scale == 1,
        ACCUMULATE=accumulate, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out


def gemm_cublas(lhs: Quantised, rhs: Quantised, *, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Multiply as `gemm` does, by torch's own blockwise product (cuBLAS); sm90 only, bfloat16 result.

    Raises what `torch.nn.functional.scaled_mm` raises for operands that it does not take.
    """
    recipe, scales = ScalingType.BlockWise1x128, rhs.scales
    if rhs.rows_per_scale != 1:  # cuBLAS wants K innermost here, and its blocks padded to a multiple of 4
        recipe = ScalingType.BlockWise128x128
        rows, blocks = scales.shape
        padded = blocks + -blocks % 4
        if scales.stride() == (padded, 1):  # cut from storage that has the padding, as a trainer's weights are
            scales = scales.as_strided((rows, padded), (padded, 1)).T
        else:
            scales = torch.nn.functional.pad(scales, (0, padded - blocks)).contiguous().T
    return scaled_mm(
        lhs.values,
        rhs.values.T,
        scale_a=lhs.scales,
        scale_recipe_a=ScalingType.BlockWise1x128,
        scale_b=scales,
        scale_recipe_b=recipe,
        output_dtype=out_dtype,
    )


def reference_gemm(lhs: Quantised, rhs: Quantised) -> torch.Tensor:
    """Multiply in plain PyTorch with the same blocks: float32 products of 128 K, scaled, added in order."""
    num_rows, num_k = lhs.values.shape
    num_cols = rhs.values.shape[0]
    total = lhs.values.new_zeros(num_rows, num_cols, dtype=torch.float32)
    rhs_scales = rhs.scales.repeat_interleave(rhs.rows_per_scale, 0)[:num_cols]
    for block, begin in enumerate(range(0, num_k, BLOCK)):
        part = slice(begin, begin + BLOCK)
        partial = lhs.values[:, part].float() @ rhs.values[:, part].float().T
        total += partial * lhs.scales[:, block, None] * rhs_scales[:, block]
    return total
