"""Attention in plain torch over a cache of latents, which all heads share (multi-head latent attention).

Of a few tokens the queries are turned into the space of latents, so that keys and values need not be made: attention
then has one KV head. Of the many tokens of a prompt it takes less work to make the keys and values of all heads.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tgi_server.engine.backends.attention.base import AttentionVariant, ChunkSpan, ForwardMetadata, Latents
from tgi_server.engine.backends.attention.pieces import pieces, scores_mask
from tgi_server.engine.memory import HOST

# Returns the latents and the rotated parts of keys in blocks, [*blocks, block_size, 1, size] each.
Gather = Callable[[Tensor], tuple[Tensor, Tensor]]


def attend_to_latents(
    gather: Gather, block_size: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant
) -> Tensor:
    """Returns the causal attention of query, [tokens, heads, size], as [tokens, heads, value_dim]."""
    latents, tokens = variant.latents, metadata.row_tokens
    assert latents is not None
    output = query.new_empty(*query.shape[:2], latents.values.shape[2])
    behind = torch.arange(tokens, device=query.device).flip(0)
    for rows, length in _rows(metadata, query.shape[1]):
        span = slice(rows.start * tokens, rows.stop * tokens)
        tables = metadata.block_tables[rows, : -(-length // block_size)].long()
        cached, rotated = (part.flatten(1, 3) for part in gather(tables))
        places = metadata.kv_lengths[rows, None].long() - 1 - behind
        queries = query[span].unflatten(0, (-1, tokens))
        output[span] = _absorbed(queries, cached, rotated, places, variant, latents).flatten(0, 1)
    for index, chunk in enumerate(metadata.chunks, start=metadata.decoding):
        span = slice(chunk.start, chunk.start + chunk.length)
        table = metadata.block_tables[index, : -(-chunk.kv_length // block_size)].long()
        cached, rotated = (part.flatten(0, 2)[: chunk.kv_length] for part in gather(table))
        attend = _expanded_chunk if chunk.length > _most_absorbed(latents, rotated) else _absorbed_chunk
        output[span] = attend(query[span], cached, rotated, chunk, variant, latents)
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


def _most_absorbed(latents: Latents, rotated: Tensor) -> int:
    """Returns the most tokens of a chunk for which keys and values that are not made save more than they cost."""
    _, size, rank = latents.keys.shape
    values = latents.values.shape[2]
    saved = rank * 2 - size - values
    return rank * (size + values) // saved if saved > 0 else rotated.shape[0]


def _absorbed(
    query: Tensor, cached: Tensor, rotated: Tensor, places: Tensor, variant: AttentionVariant, latents: Latents
) -> Tensor:
    """Returns the attention of query, [sequences, queries, heads, size], as [sequences, queries, heads, value_dim].

    cached, rotated: [sequences, keys, rank] and [sequences, keys, rotated size]. places: [sequences, queries].
    """
    count, heads = query.shape[1:3]
    plain, turned = query.split((latents.keys.shape[1], rotated.shape[2]), dim=3)
    of_latents = torch.einsum("sqhd,hdr->shqr", plain, latents.keys).flatten(1, 2)
    scores = of_latents @ cached.mT + turned.transpose(1, 2).flatten(1, 2) @ rotated.mT
    scores = scores.mul_(variant.scaling).unflatten(1, (heads, count))
    scores += scores_mask(places, torch.arange(cached.shape[1], device=query.device), variant, query)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    attended = (weights.flatten(1, 2) @ cached).unflatten(1, (heads, count))
    return torch.einsum("shqr,hrv->sqhv", attended, latents.values)


def _absorbed_chunk(
    query: Tensor, cached: Tensor, rotated: Tensor, chunk: ChunkSpan, variant: AttentionVariant, latents: Latents
) -> Tensor:
    """query: [tokens, heads, size]; cached, rotated: of the sequence, [keys, size]."""
    places = torch.arange(chunk.kv_length - chunk.length, chunk.kv_length, device=query.device)
    parts = [
        _absorbed(query[None, piece], cached[None], rotated[None], places[None, piece], variant, latents)[0]
        for piece in pieces(chunk.length, chunk.kv_length * query.shape[1])
    ]
    return torch.cat(parts)


def _expanded_chunk(
    query: Tensor, cached: Tensor, rotated: Tensor, chunk: ChunkSpan, variant: AttentionVariant, latents: Latents
) -> Tensor:
    """query: [tokens, heads, size]; cached, rotated: of the sequence, [keys, size]. Some heads at a time."""
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
