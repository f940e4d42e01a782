"""Finds the large arrays that a compiled module makes inside its loops, where it should copy nothing large."""

import math
import re

BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}
INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\w+\[[\d,]*\]\S*) ([\w\-]+)\((.*)$")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{[^}]*\})?")
OPERAND = re.compile(r"%?([\w.\-]+)(?=[,)])")
CALLED = re.compile(r"(?:body|to_apply|calls|branch_computations|true_computation|false_computation)=(\{.*?\}|[^\s,]+)")
# NOTHING_NEW only names memory that exists already. IN_PLACE writes part of the first operand in place (where XLA cannot, it puts a
# copy before, which is found).
NOTHING_NEW = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "optimization-barrier"}
IN_PLACE = {"dynamic-update-slice", "scatter", "custom-call"}
HOST = "S(5)"  # how a layout says that an array is in host memory


def large_operations(hlo: str, least: int, *, streamed: bool = False) -> list[str]:
    """Finds the operations inside the loops of a compiled module that make an array of at least `least` bytes.

    hlo: the module's text. streamed: whether whole arrays are meant to be copied between host memory and the device, so that these copies
    do not count. Returns each operation with the shape that it makes.
    """
    computations: dict[str, list[re.Match]] = {}
    entry = body = None
    for line in hlo.splitlines():
        if opening := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            body = computations.setdefault(opening[2], [])
            entry = opening[2] if opening[1] else entry
        elif found := INSTRUCTION.match(line):
            body.append(found)
    large, seen = [], set()

    def visit(name: str, in_loop: bool):
        if (name, in_loop) in seen:
            return
        seen.add((name, in_loop))
        for instruction in computations[name]:
            operation = instruction[4]
            called = re.findall(r"[\w.\-]+", " ".join(CALLED.findall(instruction[5])))
            if operation in ("while", "call", "conditional"):
                for each in called:
                    visit(each, in_loop or operation == "while")
            fused = computations[called[0]] if operation in ("fusion", "fusion-start") else None
            made = _made(instruction, streamed) if fused is None else _made_by_fusion(fused)
            large.extend(f"{kind} {shape}" for kind, shape in made if in_loop and _largest(shape) >= least)

    visit(entry, False)
    return large


def _made(instruction: re.Match, streamed: bool) -> list[tuple[str, str]]:
    """The operation and the shape that it makes, if it makes anything."""
    shape, operation = instruction[3], instruction[4]
    if operation in NOTHING_NEW | IN_PLACE or operation.endswith("-done"):  # whose start was looked at
        return []
    if operation == "copy-start":
        to, source = (HOST in array[0] for array in list(ARRAY.finditer(shape))[:2])
        return [] if streamed and to != source else [(operation, shape)]
    return [(operation, shape)]


def _made_by_fusion(fused: list[re.Match]) -> list[tuple[str, str]]:
    """The operations of a fusion that make what it gives, several if its root is a tuple, and their shapes."""
    inside = {instruction[2]: instruction for instruction in fused}
    (root,) = (instruction for instruction in fused if instruction[1])
    given = [inside[name] for name in OPERAND.findall(root[5]) if name in inside] if root[4] == "tuple" else [root]
    return [made for instruction in given for made in _made(instruction, streamed=False)]


def _largest(shape: str) -> int:
    """Bytes of the largest array of a shape."""
    sizes = [math.prod(map(int, filter(None, array[2].split(",")))) * BITS.get(array[1], 0) // 8 for array in ARRAY.finditer(shape)]
    return max(sizes, default=0)
