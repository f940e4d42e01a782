"""The layer as a composition: linear layers of any weight format, and the residual connection with its norm."""

from jaxtyping import Array, Float

from pallas_kernels.fused_layer.arguments import LayerArguments
from pallas_kernels.matmul import gated_linear, linear
from pallas_kernels.norm import add_rms_norm


def between_attentions(args: LayerArguments) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows out"], Array | None]:
    def biases_of(*names: str) -> list[Array]:
        return [args.biases[name] for name in names if name in args.biases]

    divided = {"summed_over": args.axis}
    x, h = add_rms_norm(args.x, linear(args.attended, [args.o], biases_of("o"), **divided), args.norm, eps=args.eps)
    added = linear(gated_linear(h, args.gate, args.up, biases_of("gate", "up")), [args.down], biases_of("down"), **divided)
    if args.following_norm is None:
        return x, added, args.handoff
    x, h = add_rms_norm(x, added, args.following_norm, eps=args.eps)
    return x, linear(h, args.following), args.handoff
