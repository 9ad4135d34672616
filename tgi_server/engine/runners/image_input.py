"""Images in the input of a pass: embeddings that replace tokens, rotary positions, and the reach of attention."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tgi_server.engine.backends.base import ImageTokens, PassInput
from tgi_server.engine.errors import InvalidImage
from tgi_server.engine.memory import copy_to_device
from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.runners.paged_batch import PagedBatch
from tgi_server.engine.vision.tower import VisionTower


def with_images(
    tower: VisionTower,
    inputs: PassInput,
    batch: PagedBatch,
    decoding: int,
    chunks: Sequence[PromptChunk],
    filler: int,
) -> PassInput:
    """Returns the input of a pass with the images of its chunks. Sets `fault` of a sequence with an unusable image.

    decoding: rows of the batch that decode in the pass. filler: the token that image tokens are replaced with.
    """
    if tower.two_way:
        _attend_both_ways(inputs, chunks, in_windows=tower.two_way == "windows")
    rotary = _rotary(batch, decoding, chunks) if tower.mrope else None
    rows, embeddings, added = [], [], []
    for span, chunk in zip(inputs.metadata.chunks, chunks, strict=True):
        for image in chunk.sequence.placed.placed if chunk.sequence.placed else ():
            first, end = image.within(chunk.start, chunk.start + len(chunk.tokens))
            if first == end or chunk.sequence.fault:
                continue
            try:
                features = image.features(tower)
            except InvalidImage as fault:
                chunk.sequence.fault = str(fault)
                continue
            rows.append(image.places[first:end] - chunk.start + span.start)
            embeddings.append(features.embeddings[first:end])
            added.append([tensor[first:end] for tensor in features.added])
            if end == len(image.places):
                image.release()
    if not rows:
        return replace(inputs, rotary=rotary)
    on_device = copy_to_device(torch.cat(rows), inputs.tokens.device)
    images = ImageTokens(on_device, torch.cat(embeddings), [torch.cat(tensors) for tensors in zip(*added, strict=True)])
    tokens = inputs.tokens.index_fill(0, on_device, filler)
    return replace(inputs, tokens=tokens, images=images, rotary=rotary)


def _rotary(batch: PagedBatch, decoding: int, chunks: Sequence[PromptChunk]) -> Tensor | None:
    """Returns the rotary positions of a pass, [tokens] int64, or [3, tokens] if it has tokens of images.

    None: they are the tokens' positions.
    """
    if not batch.turned(decoding) and all(chunk.sequence.placed is None for chunk in chunks):
        return None
    own = []
    for chunk in chunks:
        stop = chunk.start + len(chunk.tokens)
        placed = chunk.sequence.placed
        own.append(torch.arange(chunk.start, stop).expand(3, -1) if placed is None
                   else placed.rotary(chunk.start, stop))  # fmt: skip
    positions = torch.cat(own, 1)
    decoded = batch.rotary(decoding)
    assert decoded is not None
    if bool((positions == positions[0]).all()):
        return torch.cat([decoded, copy_to_device(positions[0].contiguous(), batch.positions.device)])
    return torch.cat([decoded.expand(3, -1), copy_to_device(positions.contiguous(), batch.positions.device)], 1)


def _attend_both_ways(inputs: PassInput, chunks: Sequence[PromptChunk], *, in_windows: bool) -> None:
    """Sets `ends` in a pass's metadata for image tokens. in_windows: True if only for layers with a window."""
    metadata = inputs.metadata
    found = [
        None if chunk.sequence.placed is None else chunk.sequence.placed.ends(chunk.start, span.kv_length)
        for span, chunk in zip(metadata.chunks, chunks, strict=True)
    ]
    if all(ends is None for ends in found):
        return
    metadata.ends = inputs.positions.to(torch.int32) + 1
    metadata.ends_in_windows = in_windows
    for span, ends in zip(metadata.chunks, found, strict=True):
        if ends is not None:
            metadata.ends[span.start : span.start + span.length] = copy_to_device(ends, metadata.ends.device)
