"""float32 to e4m3 by integer bits, and the scale of a tile: the one cast that all of FP8 goes through.

    scale   amax = max |x| of the tile, at least 1e-4; scale = amax / 448, or the power of two above
    cast    q = x / scale, saturated at +-448, rounded to the nearest, ties to even, 3 bits of mantissa

An e4m3 code is sign (1 bit), exponent (4, bias 7), mantissa (3); there is no infinity, 0x7f is NaN:

    448.0 -> 0x7e    2**-6 -> 0x08 (smallest normal)    2**-9 -> 0x01 (smallest)    -1.0 -> 0xb8

A NaN in a tile makes the tile's scale and so the whole tile NaN, as with torch's amax: the maximum is
taken over the values' bits as integers, where NaN is above everything. An infinity gives 0 and NaN.

Bits are the same on a GPU, in Triton's interpreter and in the reference: integer operations, one
IEEE division, one exact float32 addition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4


@triton.jit
def e4m3_code(x):
    """Return the e4m3 codes (uint8) of float32 `x`: saturating, ties to even, NaN to 0x7f."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: drop 20 of the 23 mantissa bits, ties to even; 960 = (127 - 7) << 3 moves the bias.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2**-6: the spacing is 2**-9, which is that of float32 at 2**14, so an addition rounds.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.minimum(code, 0x7E)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_e4m3(x, BY_BITS: tl.constexpr):
    """Return float32 `x` as e4m3; BY_BITS picks the integer form, else the hardware's instruction."""
    if BY_BITS:
        return e4m3_code(x).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| as int32: ordered as |x| is, with NaN above infinity."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of_amax(amax_bits, POWER_OF_TWO: tl.constexpr):
    """Return the float32 scale of a tile from the bits of its amax."""
    floored = tl.maximum(amax_bits, 0x38D1B717)  # 1e-4
    scale = tl.div_rn(floored.to(tl.float32, bitcast=True), 448.0)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        above = (bits + 0x7FFFFF) & 0x7F800000
        scale = tl.where(bits < 0x7F800000, above, bits).to(tl.float32, bitcast=True)
    return scale


def reference_scale(amax: torch.Tensor, power_of_two: bool = False) -> torch.Tensor:
    """Return the scale of tiles from their amax (float32, any shape) in plain PyTorch."""
    floored = amax.float().clamp(min=AMAX_FLOOR)
    # By a tensor: on a GPU PyTorch multiplies by the reciprocal of a number, which rounds twice.
    scale = floored / torch.full_like(floored, E4M3_MAX)
    if not power_of_two:
        return scale
    bits = scale.view(torch.int32)
    above = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scale.isfinite(), above, scale)


def reference_cast(x: torch.Tensor) -> torch.Tensor:
    """Return float32 `x` as float8_e4m3fn in plain PyTorch: clamped to +-448, ties to even."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
