"""From recorded nodes to a tape: joins ops that can be one, gives values their buffers, fills the C structs.

Knows the order of ops and the lifetime of values; no arithmetic. Joined are: norm or activation before
products (they are applied to a row just before it is quantised), and a sum after a product.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.decoder.kernels.cpu import structs
from model.decoder.kernels.cpu.record import Node, Value
from model.decoder.rope import inverse_frequencies
from model.decoder.spec import RopeSpec

_IN_PLACE = ("scale", "clip", "softcap", "add")
_POINTERS = ("weight", "bias", "slopes", "sink_logits")


def fuse(nodes: list[Node]) -> list[Node]:
    """Fewer nodes with the same meaning."""
    return _fold_sums(_fold_prologues(nodes))


def _readers(nodes: list[Node]) -> dict[Value, list[Node]]:
    readers: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in (*node.ins, *((node.residual,) if node.residual else ())):
            readers.setdefault(value.root, []).append(node)
    return readers


def _fold_prologues(nodes: list[Node]) -> list[Node]:
    readers = _readers(nodes)
    kept = []
    for node in nodes:
        reading = readers.get(node.out, []) if node.out is not None else []
        whole = node.code == "activate" or (node.code == "norm" and node.fields["groups"] == 1)
        if whole and reading and all(reader.code == "linear" and reader.ins == [node.out] for reader in reading):
            for reader in reading:
                reader.prologue = node.code
                reader.ins = list(node.ins)
                reader.fields |= node.fields
        else:
            kept.append(node)
    return kept


def _fold_sums(nodes: list[Node]) -> list[Node]:
    readers = _readers(nodes)
    made = {node.out: place for place, node in enumerate(nodes) if node.out is not None}
    gone = set()
    for place, node in enumerate(nodes):
        if node.code != "add":
            continue
        for product, other in ((1, 0), (0, 1)):
            maker = nodes[made[node.ins[product]]] if node.ins[product] in made else None
            if maker is None or maker.code != "linear" or maker.residual is not None:
                continue
            if readers[node.ins[product]] != [node] or made.get(node.ins[other].root, place) >= made[node.ins[product]]:
                continue
            maker.residual, maker.out = node.ins[other], node.out
            if node.out is not None:
                made[node.out] = made[node.ins[product]]
            gone.add(place)
            break
    return [node for place, node in enumerate(nodes) if place not in gone]


def _shared_memory(nodes: list[Node], last: dict[Value, int]) -> dict[Value, Value]:
    """Values that take over an operand's memory: its last reader reads and writes each entry at one place."""
    heirs: dict[Value, Value] = {}
    for place, node in enumerate(nodes):
        if node.out is None:
            continue
        operand = node.residual if node.code == "linear" else node.ins[0] if node.code in _IN_PLACE else None
        if operand is None or operand.base is not None or last[operand] != place or operand.width != node.out.width:
            continue
        if node.code == "linear" and node.ins[0].root is operand:
            continue
        heirs[node.out] = operand
    return heirs


def assign_buffers(nodes: list[Node], result: Value) -> tuple[dict[Value, int], list[int]]:
    """The buffer number of each root value, and the widths of the buffers; memory is reused once it is read."""
    last = {value: place for place, node in enumerate(nodes) for value in _roots(node)}
    heirs = _shared_memory(nodes, last)

    def first_owner(value: Value) -> Value:
        while value in heirs:
            value = heirs[value]
        return value

    end: dict[Value, int] = {}
    for value, place in last.items():
        owner = first_owner(value)
        end[owner] = max(end.get(owner, -1), place)
    end[first_owner(result)] = len(nodes)
    buffers: dict[Value, int] = {first_owner(result): structs.LOGITS}
    widths: list[int] = []
    free: dict[int, list[int]] = {}
    for place, node in enumerate(nodes):
        if node.out is not None:
            owner = first_owner(node.out)
            if owner not in buffers:
                if free.get(owner.width):
                    buffers[owner] = free[owner.width].pop()
                else:
                    buffers[owner] = len(widths)
                    widths.append(owner.width)
        for owner in {first_owner(value) for value in _roots(node)}:
            if end[owner] == place and buffers[owner] >= 0:
                free.setdefault(owner.width, []).append(buffers[owner])
    return {value: buffers[first_owner(value)] for value in last}, widths


def _roots(node: Node) -> set[Value]:
    values = [*node.ins, *((node.residual,) if node.residual else ()), *((node.out,) if node.out else ())]
    return {value.root for value in values}


@dataclass
class TapeArrays:
    """The arrays of structs a tape is made of, and the tensors their pointers need to stay alive."""

    ops: "ctypes.Array[structs.Op]"
    parts: "ctypes.Array[structs.Part]"
    widths: "ctypes.Array[ctypes.c_int64]"
    rotations: "ctypes.Array[structs.RotationSpec]"
    keep: list[Tensor] = field(default_factory=list)


def assemble(nodes: list[Node], result: Value) -> TapeArrays:
    """Fill the structs of a fused list of nodes."""
    buffers, widths = assign_buffers(nodes, result)
    ropes = list(dict.fromkeys(node.rope for node in nodes if node.rope is not None))
    keep: list[Tensor] = []
    parts: list[structs.Part] = []
    ops = []
    if ropes:
        ops.append(_op("rotations"))
    for node in nodes:
        op = _op(node.code, **_converted(node.fields, keep))
        op.selected = int(node.out is not None and node.out.selected)
        _place_operands(op, node, buffers)
        op.prologue = structs.PROLOGUES[node.prologue] if node.prologue else 0
        op.rotation = ropes.index(node.rope) if node.rope is not None else -1
        op.first_part, op.num_parts = len(parts), len(node.parts)
        parts += _parts(node, keep)
        ops.append(op)
    rotations = [_rotation(rope, keep) for rope in ropes]
    return TapeArrays(
        (structs.Op * len(ops))(*ops),
        (structs.Part * len(parts))(*parts),
        (ctypes.c_int64 * len(widths))(*widths),
        (structs.RotationSpec * len(rotations))(*rotations),
        keep,
    )


def _op(code: str, **fields: Any) -> structs.Op:
    op = structs.Op(**{"code": structs.CODES[code], "groups": 1} | fields)
    for name in ("in", "in2", "in3", "out"):
        setattr(op, name, structs.Slice(structs.ABSENT, 0, 0, 0))
    return op


def _converted(fields: dict[str, Any], keep: list[Tensor]) -> dict[str, Any]:
    converted = dict(fields)
    for name in _POINTERS:
        if name in converted:
            keep.append(converted[name])
            converted[name] = converted[name].data_ptr()
    if "activation" in converted:
        converted["activation"] = structs.ACTIVATIONS[converted["activation"]]
    if "norm_kind" in converted:
        converted["norm_kind"] = structs.NORMS[converted["norm_kind"]]
    return converted


def _place_operands(op: structs.Op, node: Node, buffers: dict[Value, int]) -> None:
    def slice_of(value: Value) -> structs.Slice:
        return structs.Slice(buffers[value.root], value.offset, value.width, value.root.width)

    for name, value in zip(("in", "in2", "in3"), node.ins, strict=False):
        setattr(op, name, slice_of(value))
    if node.residual is not None:
        op.in2 = slice_of(node.residual)
    if node.out is not None:
        op.out = slice_of(node.out)


def _parts(node: Node, keep: list[Tensor]) -> list[structs.Part]:
    made, column = [], 0
    for weight, bias in node.parts:
        keep.append(weight.data)
        if bias is not None:
            keep.append(bias)
        pointer = None if bias is None else bias.data_ptr()
        made.append(
            structs.Part(
                weight.data.data_ptr(),
                pointer,
                weight.out_features,
                weight.in_features,
                column,
                structs.FORMATS[weight.form],
            )
        )
        column += weight.out_features
    return made


def _rotation(rope: RopeSpec, keep: list[Tensor]) -> structs.RotationSpec:
    frequencies = inverse_frequencies(rope).to(torch.float64).contiguous()
    keep.append(frequencies)
    return structs.RotationSpec(
        frequencies.data_ptr(), rope.attention_factor, frequencies.numel(), int(rope.layout == "pairs")
    )
