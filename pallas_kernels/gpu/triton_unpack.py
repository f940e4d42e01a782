"""4-bit codes to 16-bit numbers in Triton, for every kernel that reads packed ones."""

import triton
import triton.language as tl


@triton.jit
def unpack(packed, HIGH_BYTE: tl.constexpr, DTYPE: tl.constexpr):
    """Four bytes at a time: the low nibbles and the high nibbles as 16-bit numbers with the given high byte."""
    high_byte = tl.full(packed.shape, HIGH_BYTE, tl.uint8)
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high;
        and.b32 low, $4, 0x0F0F0F0F;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0F0F0F0F;
        prmt.b32 $0, low, $5, 0x4140;
        prmt.b32 $1, low, $5, 0x4342;
        prmt.b32 $2, high, $5, 0x4140;
        prmt.b32 $3, high, $5, 0x4342;
        }""",
        "=r,=r,=r,=r,r,r",
        [packed, high_byte],
        dtype=(tl.uint16, tl.uint16),
        is_pure=True,
        pack=4,
    )
    return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)
