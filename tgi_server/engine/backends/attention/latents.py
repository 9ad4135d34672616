"""Attention in plain torch over a cache of latents, which all heads share (multi-head latent attention).

For a few tokens, the queries are projected into the space of latents, so that keys and values need not be computed:
attention then has one KV head. For the many tokens of a prompt, computing all heads' keys and values is less work.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tgi_server.engine.backends.attention.base import (
    AttentionVariant,
    ChunkSpan,
    ForwardMetadata,
    Latents,
    Selection,
)
from tgi_server.engine.backends.attention.pieces import pieces, scores_mask
from tgi_server.engine.memory import HOST

# Returns the latents of blocks in a layer, and the rotated parts cached with them, [*blocks, block_size, 1, size] each.
Gather = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def latents_of(attention: Any) -> Latents:
    """Returns the weights with which an attention module of `transformers` computes keys and values from latents."""
    size, weight = attention.qk_nope_head_dim, attention.kv_b_proj.weight.to(attention.kv_a_layernorm.weight.dtype)
    heads = weight.unflatten(0, (-1, size + attention.v_head_dim))
    return Latents(heads[:, :size].contiguous(), heads[:, size:].mT.contiguous())


def attend_to_latents(
    gather: Gather,
    layer: int,
    block_size: int,
    query: Tensor,
    metadata: ForwardMetadata,
    variant: AttentionVariant,
    decoded: Tensor | None = None,
) -> Tensor:
    """Returns the causal attention of query, [tokens, heads, size], as [tokens, heads, value_dim].

    decoded: the attention of the sequences that decode, if a kernel has computed it.
    """
    latents, tokens, selection = variant.latents, metadata.row_tokens, variant.selection
    assert latents is not None
    output = query.new_empty(*query.shape[:2], latents.values.shape[2])
    behind = torch.arange(tokens, device=query.device).flip(0)

    def cached(tables: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns latents, rotated parts and keys of the index, [sequences, keys, size], of tables of blocks."""
        of_layer, beside = (part.flatten(1, 3)[:, :length] for part in gather(layer, tables))
        if selection is None:
            return of_layer, beside, None
        index = gather(selection.layer, tables)[1].flatten(1, 3)[:, :length, -selection.query.shape[2] :]
        return of_layer, beside[..., : query.shape[2] - latents.keys.shape[1]], index

    if decoded is not None:
        output[: len(decoded)] = decoded
    for rows, length in _rows(metadata, query.shape[1]) if decoded is None else ():
        span = slice(rows.start * tokens, rows.stop * tokens)
        parts = cached(metadata.block_tables[rows, : -(-length // block_size)].long(), length)
        places = metadata.kv_lengths[rows, None].long() - 1 - behind
        output[span] = _absorbed(query, span, tokens, parts, places, variant, latents).flatten(0, 1)
    for index, chunk in enumerate(metadata.chunks, start=metadata.decoding):
        table = metadata.block_tables[index, : -(-chunk.kv_length // block_size)].long()
        parts = cached(table[None], chunk.kv_length)
        long = selection is None and chunk.length > _most_absorbed(latents, chunk.kv_length)
        span = slice(chunk.start, chunk.start + chunk.length)
        if long:
            output[span] = _expanded_chunk(query[span], parts[0][0], parts[1][0], chunk, variant, latents)
            continue
        places = torch.arange(chunk.kv_length - chunk.length, chunk.kv_length, device=query.device)
        for piece in pieces(chunk.length, chunk.kv_length * query.shape[1]):
            span = slice(chunk.start + piece.start, chunk.start + piece.stop)
            count = piece.stop - piece.start
            output[span] = _absorbed(query, span, count, parts, places[None, piece], variant, latents)[0]
    return output


def _rows(metadata: ForwardMetadata, heads: int) -> Iterator[tuple[slice, int]]:
    """Yields rows that decode, and an upper bound of their lengths.

    On a CPU, where lengths are known, it is row by row: no key of a shorter one is read in vain.
    """
    if metadata.kv_lengths.device == HOST:
        for row, length in enumerate(metadata.kv_lengths[: metadata.decoding].tolist()):
            yield slice(row, row + 1), length
        return
    longest = metadata.max_kv_length
    for rows in pieces(metadata.decoding, longest * heads * metadata.row_tokens):
        yield rows, longest


def _most_absorbed(latents: Latents, length: int) -> int:
    """Returns the largest chunk, in tokens, for which attending to latents is less work than computing all keys."""
    _, size, rank = latents.keys.shape
    values = latents.values.shape[2]
    saved = rank * 2 - size - values
    return rank * (size + values) // saved if saved > 0 else length


def _absorbed(
    query: Tensor,
    span: slice,
    count: int,
    cached: tuple[Tensor, Tensor, Tensor | None],
    places: Tensor,
    variant: AttentionVariant,
    latents: Latents,
) -> Tensor:
    """Returns the attention of the queries in `span`, `count` of each sequence: [sequences, count, heads, value_dim].

    cached: latents, rotated parts and keys of the index, [sequences, keys, size] each. places: [sequences, count].
    """
    of_latents, rotated, index = cached
    heads = query.shape[1]
    queries = query[span].unflatten(0, (-1, count))
    mask = scores_mask(places, torch.arange(of_latents.shape[1], device=query.device), variant, query)
    if index is not None and variant.selection is not None and variant.chosen < len(index[0]):
        chosen = _chosen(mask[:, 0], variant.selection, variant.chosen, span, index)
        if count == 1:  # so that no other token is read
            of_latents, rotated = (each.take_along_dim(chosen.mT, 1) for each in (of_latents, rotated))
            mask = mask.gather(3, chosen.unsqueeze(1))
        else:
            mask = mask + torch.full_like(mask, float("-inf")).scatter_(3, chosen.unsqueeze(1), 0)
    plain, turned = queries.split((latents.keys.shape[1], rotated.shape[2]), dim=3)
    in_latents = torch.einsum("sqhd,hdr->shqr", plain, latents.keys).flatten(1, 2)
    scores = in_latents @ of_latents.mT + turned.transpose(1, 2).flatten(1, 2) @ rotated.mT
    scores = scores.mul_(variant.scaling).unflatten(1, (heads, count))
    weights = torch.softmax(scores + mask, dim=-1, dtype=torch.float32).to(query.dtype)
    attended = (weights.flatten(1, 2) @ of_latents).unflatten(1, (heads, count))
    return torch.einsum("shqr,hrv->sqhv", attended, latents.values)


def _chosen(mask: Tensor, selection: Selection, tokens: int, span: slice, keys: Tensor) -> Tensor:
    """Returns the tokens with the highest scores of the index, in ascending order: [sequences, queries, tokens].

    mask: [sequences, queries, keys]. keys: the index's keys, [sequences, keys, size].
    """
    query, weights = (rows[span].unflatten(0, mask.shape[:2]) for rows in (selection.query, selection.weights))
    scores = torch.einsum("sqhd,skd->sqhk", query.float(), keys.float()).relu_()
    total = torch.einsum("sqhk,sqh->sqk", scores, weights) + mask
    return total.topk(tokens, dim=-1).indices.sort(dim=-1).values


def _expanded_chunk(
    query: Tensor, cached: Tensor, rotated: Tensor, chunk: ChunkSpan, variant: AttentionVariant, latents: Latents
) -> Tensor:
    """Attends for one chunk, some heads at a time.

    query: [tokens, heads, size]. cached, rotated: the sequence's latents and rotated key parts, [keys, size].
    """
    heads, keys = query.shape[1], torch.arange(chunk.kv_length, device=query.device)
    output = query.new_empty(chunk.length, heads, latents.values.shape[2])
    places = torch.arange(chunk.kv_length - chunk.length, chunk.kv_length, device=query.device)
    for some in pieces(heads, chunk.kv_length * (query.shape[2] + output.shape[2])):
        made = cached @ latents.keys[some].mT
        key = torch.cat([made, rotated.expand(len(made), -1, -1)], dim=2)
        value = cached @ latents.values[some]
        for piece in pieces(chunk.length, chunk.kv_length * len(key)):
            mask = scores_mask(places[None, piece], keys, variant, query)[0]
            part = scaled_dot_product_attention(
                query[piece, some].transpose(0, 1), key, value, attn_mask=mask, scale=variant.scaling
            )
            output[piece, some] = part.transpose(0, 1)
    return output
