"""Attention of a ragged batch over the K/V arena, per request and, in invariant mode, per row independent of the batch.

CPU attention is bit-stable for a row when two things depend on the row alone: the padded length of the keys it sees,
and the product kernel chosen for its query rows. So in invariant mode keys are padded to a multiple of 64 and rows with
different padded lengths go into different calls. Query rows (a K/V head's query heads of every token row) are padded to
a multiple of 4 in either mode: oneDNN takes another, slower kernel for what is left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and every prompt is one

KEY_BLOCK = 64
QUERY_BLOCK = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one request in a pass: ``rows`` rows from ``row``, the first at ``position``.

    ``slot`` is the arena slot of the request's position 0.
    """

    row: int
    rows: int
    slot: int
    position: int


def arena_slots(positions: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Arena slots [rows] of a pass whose rows stand at ``positions``."""
    slots = [segment.slot for segment in segments for _ in range(segment.rows)]
    return positions + torch.tensor(slots, device=positions.device)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [row, row + rows) attending to arena slots [slot, slot + keys) under ``mask`` [1, 1, queries, keys].

    Queries are rows times query heads per K/V head, padded to a multiple of QUERY_BLOCK. Without a mask every row sees
    every key, or, where ``causal``, the keys up to its own.
    """

    row: int
    rows: int
    slot: int
    keys: int
    mask: Tensor | None
    causal: bool = False


def plan_attention(
    segments: Sequence[Segment], group: int, *, invariant: bool, dtype: torch.dtype, device: torch.device
) -> list[Tile]:
    """Cut segments into tiles for ``group`` query heads per K/V head; a tile's rows share one padded key length.

    On CUDA whole prompts need no mask, so that its flash kernels take them.
    """
    tiles = []
    for segment in segments:
        if device.type == "cuda" and not invariant and segment.position == 0:
            tiles.append(Tile(segment.row, segment.rows, segment.slot, segment.rows, None, causal=True))
            continue
        first, end = segment.position, segment.position + segment.rows
        while first < end:
            if invariant:
                keys = (first // KEY_BLOCK + 1) * KEY_BLOCK
                last = min(end, keys)
            else:
                keys = last = end
            queries = (last - first) * group
            mask = torch.zeros(_padded(queries), keys, dtype=dtype, device=device)
            visible = torch.arange(first, last, device=device).repeat_interleave(group)
            hidden = torch.arange(keys, device=device)[None, :] > visible[:, None]
            mask[:queries].masked_fill_(hidden, float("-inf"))
            row = segment.row + first - segment.position
            tiles.append(Tile(row, last - first, segment.slot, keys, mask[None, None]))
            first = last
    return tiles


def plan_block_attention(segments: Sequence[Segment], windows: Sequence[int]) -> list[Tile]:
    """One tile a block: its rows see each other and the keys from their request's position ``windows`` on."""
    return [
        Tile(block.row, block.rows, block.slot + window, block.position + block.rows - window, None)
        for block, window in zip(segments, windows, strict=True)
    ]


def attend(q: Tensor, kv: Tensor, tiles: Sequence[Tile]) -> Tensor:
    """Attention output [rows, heads * head_dim] of q [rows, heads, head_dim] over kv [slots, 2 * kv_heads, head_dim].

    The first half of kv's heads are keys, the second half values.
    """
    if all(tile.causal for tile in tiles):
        return torch.cat([_attend_causal(q, kv, tile) for tile in tiles])
    rows, heads, head_dim = q.shape
    kv_heads = kv.shape[1] // 2
    group = heads // kv_heads
    grouped = q.reshape(rows, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, rows * group, head_dim)
    outputs = []
    for tile in tiles:
        if tile.causal:
            output = _attend_causal(q, kv, tile).view(tile.rows, kv_heads, group, head_dim).transpose(0, 1)
            outputs.append(output.reshape(kv_heads, tile.rows * group, head_dim))
            continue
        first, count = tile.row * group, tile.rows * group
        query = grouped[:, first : first + count]
        if count % QUERY_BLOCK:
            query = F.pad(query, (0, 0, 0, _padded(count) - count))
        keys_values = kv[tile.slot : tile.slot + tile.keys].transpose(0, 1)
        keys, values = keys_values[None, :kv_heads], keys_values[None, kv_heads:]
        output = F.scaled_dot_product_attention(query[None], keys, values, attn_mask=tile.mask)
        outputs.append(output[0, :, :count])
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return joined.reshape(kv_heads, rows, group, head_dim).transpose(0, 1).reshape(rows, heads * head_dim)


def _attend_causal(q: Tensor, kv: Tensor, tile: Tile) -> Tensor:
    """Output [rows, heads * head_dim] of rows that are all there is of a request."""
    kv_heads = kv.shape[1] // 2
    query = q[tile.row : tile.row + tile.rows].transpose(0, 1)[None]
    keys_values = kv[tile.slot : tile.slot + tile.keys].transpose(0, 1)[None]
    output = F.scaled_dot_product_attention(
        query, keys_values[:, :kv_heads], keys_values[:, kv_heads:], is_causal=True, enable_gqa=True
    )
    return output[0].transpose(0, 1).reshape(tile.rows, -1)


def _padded(queries: int) -> int:
    return -(-queries // QUERY_BLOCK) * QUERY_BLOCK
