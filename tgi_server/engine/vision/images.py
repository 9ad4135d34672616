"""The images of prompts, and the places of their tokens in a pass."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tgi_server.contract import Image
from tgi_server.engine.errors import InvalidCall, InvalidImage
from tgi_server.engine.vision.tower import ImageFeatures, VisionTower


class PlacedImage:
    """An image of a prompt. places: [tokens] int64, where its embeddings go."""

    def __init__(self, image: Image, places: Tensor) -> None:
        self._image = image
        self.places = places
        self._features: ImageFeatures | None = None

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Returns which of its embeddings go to the prompt's tokens `start` to `stop` - 1: the first, and the end."""
        first, end = torch.searchsorted(self.places, torch.tensor([start, stop])).tolist()
        return first, end

    def features(self, tower: VisionTower) -> ImageFeatures:
        """Returns its features, which it keeps until `release`. Raises InvalidImage."""
        if self._features is None:
            features = tower.encode(self._image)
            if len(features.embeddings) != len(self.places):
                raise InvalidImage(
                    f"an image has {len(self.places)} tokens in the prompt, but the model makes "
                    f"{len(features.embeddings)} of it"
                )
            self._features = features
        return self._features

    def release(self) -> None:
        self._features = None


class PromptImages:
    """The images of one prompt.

    rope_delta: the rotary positions of tokens after the prompt less their positions.
    """

    def __init__(self, tower: VisionTower, ids: Sequence[int], images: Sequence[Image]) -> None:
        """Raises InvalidImage for images that do not fit the prompt."""
        known = torch.tensor(ids, dtype=torch.int64)
        end = 0
        self.placed: list[PlacedImage] = []
        for image in images:
            if image.start < end or image.start + image.length > len(ids):
                raise InvalidImage(
                    f"an image has tokens {image.start} to {image.start + image.length - 1}, but the prompt has "
                    f"{len(ids)}, and the image before it ends at {end}"
                )
            end = image.start + image.length
            places = (known[image.start : end] == tower.token_id).nonzero().flatten() + image.start
            self.placed.append(PlacedImage(image, places))
        self._rotary = tower.rope_index(known, images) if tower.mrope else None
        self.rope_delta = 0 if self._rotary is None else int(self._rotary.max()) + 1 - len(known)
        self._runs = _runs(torch.cat([image.places for image in self.placed]).tolist()) if tower.two_way else []

    def rotary(self, start: int, stop: int) -> Tensor:
        """Returns the rotary positions of the tokens `start` to `stop` - 1 of the sequence: [3, tokens] int64."""
        behind = torch.arange(start, stop) + self.rope_delta
        if self._rotary is None or start >= self._rotary.shape[1]:
            return behind.expand(3, -1)
        own = self._rotary[:, start:stop]
        return torch.cat([own, behind[own.shape[1] :].expand(3, -1)], 1)

    def ends(self, start: int, stop: int) -> Tensor | None:
        """Returns how many tokens each token from `start` to `stop` - 1 attends to, [tokens] int32; None: up to itself.

        Raises InvalidCall if the tokens end within an image whose tokens attend to each other.
        """
        runs = [(first, end) for first, end in self._runs if first < stop and end > start]
        if not runs:
            return None
        if runs[-1][1] > stop:
            raise InvalidCall(f"a chunk ends at token {stop}, inside an image with tokens up to {runs[-1][1]}")
        ends = torch.arange(start + 1, stop + 1, dtype=torch.int32)
        for first, end in runs:
            ends[max(0, first - start) : end - start] = end
        return ends


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the first place and the end of each run of neighbouring places."""
    if not places:
        return []
    breaks = [index for index, (left, right) in enumerate(pairwise(places), 1) if right != left + 1]
    return [(places[first], places[end - 1] + 1) for first, end in pairwise([0, *breaks, len(places)])]
