"""Finds the large arrays that a compiled module makes inside its loops, where it should copy nothing large."""

import math
import re

BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}
INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\w+\[[\d,]*\]\S*) ([\w\-]+)\((.*)$")
# NOTHING_NEW only names memory that exists already. IN_PLACE writes part of the first operand in place (where XLA cannot, it puts a
# copy before, which is found). What a kernel makes besides counts among the temporaries.
NOTHING_NEW = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "optimization-barrier"}
HOST = "S(5)"  # how a layout says that an array is in host memory
IN_PLACE = {"dynamic-update-slice", "scatter", "custom-call"}


def large_operations(hlo: str, least: int) -> list[str]:
    """Finds the operations inside the loops of a compiled module that make an array of at least `least` bytes.

    hlo: the module's text. Returns each operation with the shape that it makes.
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

    def check(*made: tuple[str, str], in_loop: bool):
        for operation, shape in made:
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", shape)
            sizes = [math.prod(map(int, filter(None, d.split(",")))) * BITS.get(t, 0) // 8 for t, d in arrays]
            if operation == "copy-start" and HOST in shape:
                continue  # to or from host memory, as is meant
            if in_loop and max(sizes, default=0) >= least and operation not in NOTHING_NEW | IN_PLACE:
                large.append(f"{operation} {shape}")

    def visit(name: str, in_loop: bool):
        if (name, in_loop) in seen:
            return
        seen.add((name, in_loop))
        for instruction in computations[name]:
            _, _, shape, operation, rest = instruction.groups()
            attributes = re.findall(r"(?:body|to_apply|calls|branch_computations|true_computation|false_computation)=(\{.*?\}|[^\s,]+)", rest)
            called = re.findall(r"[\w.\-]+", " ".join(attributes))
            if operation.endswith("-done"):
                continue  # its start was looked at
            if operation in ("fusion", "fusion-start"):
                # What the fusion makes: several arrays if its root is a tuple.
                inside = {inner[2]: inner for inner in computations[called[0]]}
                root = next(inner for inner in inside.values() if inner[1])
                names = re.findall(r"%?([\w.\-]+)(?=[,)])", root[5]) if root[4] == "tuple" else [root[2]]
                check(*((inside[name][4], inside[name][3]) for name in names if name in inside), in_loop=in_loop)
                continue
            if operation in ("while", "call", "conditional"):
                for each in called:
                    visit(each, in_loop or operation == "while")
            check((operation, shape), in_loop=in_loop)

    visit(entry, False)
    return large
