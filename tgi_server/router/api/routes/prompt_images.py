"""Images in prompts: of conversations, and in TGI's Markdown."""

import re
from collections.abc import Callable, Sequence

from tgi_server.router.errors import InvalidRequest
from tgi_server.router.media.images import ImageSource
from tgi_server.router.service import Service
from tgi_server.router.text.special_tokens import RenderedPrompt

_BEGINS = "![]("
_DATA_BEGINS = f"{_BEGINS}data:image/"
_MARKDOWN = re.compile(r"!\[\]\(((?:data:|https?://)[^)\s]*)\)", re.IGNORECASE)


def check_images(service: Service, sources: Sequence[ImageSource]) -> None:
    """Raises InvalidRequest if there are images, and the model reads none."""
    if sources and service.text.images is None:
        raise InvalidRequest(f"images are not supported: {service.text.no_images}", param=sources[0].place)


async def with_images(
    service: Service, prompt: RenderedPrompt, sources: Sequence[ImageSource], hold: Callable[[int], None]
) -> RenderedPrompt:
    """Returns the prompt with the tokens of its images. hold: counts the bytes of these. Raises InvalidRequest."""
    if service.text.images is None or not sources:
        return prompt
    return prompt.with_images(await service.text.images.read(sources, hold))


async def markdown_prompt(service: Service, prompt: str, field: str, hold: Callable[[int], None]) -> RenderedPrompt:
    """Returns a prompt in which Markdown images, as TGI has them, are the tokens of images. Raises InvalidRequest.

    For a model that reads none, Markdown with URLs is text; the data of an image is refused. field: the prompt's.
    """
    text = service.text
    if text.images is None and _DATA_BEGINS in prompt:
        raise InvalidRequest(f"images are not supported: {text.no_images}", param=field)
    if text.images is None or _BEGINS not in prompt:
        return RenderedPrompt(prompt)
    parts = await text.threads.run(len(prompt), lambda: _MARKDOWN.split(prompt))
    sources = [ImageSource(url, f"image {number} of {field}") for number, url in enumerate(parts[1::2], 1)]
    images = await text.images.read(sources, hold)
    for number, image in enumerate(images):
        shown = text.template.image_text(image.placeholder)
        parts[2 * number + 1] = shown.replace(image.placeholder, image.text)
    return RenderedPrompt("".join(parts), images=images)
