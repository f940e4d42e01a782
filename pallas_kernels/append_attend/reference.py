"""The two operations one after the other, each by whichever of its kernels can run."""

import dataclasses

from jaxtyping import Array, Float

from pallas_kernels.append_attend.arguments import AppendAttendArguments
from pallas_kernels.attention import decode_attention
from pallas_kernels.formats.token_codes import Layer
from pallas_kernels.rope_append import rotate_and_append


def append_and_attend(args: AppendAttendArguments) -> tuple[Float[Array, "B T N H"], Layer, Float[Array, "B K T C"] | None]:
    """See `pallas_kernels.append_attend.append_and_attend`."""
    q, buffer = rotate_and_append(*args.of_append)
    new = args.layer.with_buffer(buffer)
    longer = dataclasses.replace(args.lengths, buffered=args.lengths.buffered + args.qkv.shape[1])
    attended, mass = decode_attention(q, new, longer, args.view)
    return attended, new, mass
