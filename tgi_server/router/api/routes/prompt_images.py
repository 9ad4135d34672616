"""Images in prompts: of conversations, and in TGI's Markdown."""

import re
from collections.abc import Sequence
from itertools import chain, zip_longest

from tgi_server.router.api.access import cache_namespace
from tgi_server.router.api.admission import Admission
from tgi_server.router.errors import ContextOverflow, InvalidRequest
from tgi_server.router.media.images import ImageClient, ImageReader, ImageSource, ProcessedImage
from tgi_server.router.service import Service
from tgi_server.router.text.special_tokens import RenderedPrompt

_DATA_BEGINS = "![](data:image/"
# TGI's notation of an image, with any URL. An unclosed one is matched up to the end of the text, which keeps the scan
# linear.
_MARKDOWN = re.compile(r"!\[\]\(([^)]*)(\)?)")


def check_images(service: Service, sources: Sequence[ImageSource]) -> None:
    """Raises InvalidRequest if there are images but the model reads none."""
    if sources and service.text.images is None:
        raise InvalidRequest(f"images are not supported: {service.text.no_images}", param=sources[0].place)


async def with_images(
    admission: Admission, prompt: RenderedPrompt, sources: Sequence[ImageSource], salt: str | None = None
) -> RenderedPrompt:
    """Adds the tokens of images to a prompt. salt: the request's `cache_salt`.

    Raises InvalidRequest.
    """
    text = admission.service.text
    if text.images is None or not sources:
        return prompt
    images = await _read(admission, text.images, sources, salt)
    return await text.threads.handle_text(len(prompt.text), lambda: prompt.with_images(images))


async def _read(
    admission: Admission, reader: ImageReader, sources: Sequence[ImageSource], salt: str | None
) -> tuple[ProcessedImage, ...]:
    client = ImageClient(admission.owner, cache_namespace(admission.tenant, salt), admission.lease)
    return await reader.read(sources, client)


async def markdown_prompt(admission: Admission, prompt: str, field: str, salt: str | None = None) -> RenderedPrompt:
    """Replaces TGI's Markdown images in a prompt by the tokens of the images. Raises InvalidRequest.

    If the model reads no images, Markdown with URLs is plain text, but data URLs of images are refused.

    field: the prompt's field in the request. salt: the request's `cache_salt`.
    """
    service, text = admission.service, admission.service.text
    reader = text.images
    if reader is None:
        if await text.threads.handle_text(len(prompt), lambda: _DATA_BEGINS in prompt):
            raise InvalidRequest(f"images are not supported: {text.no_images}", param=field)
        return RenderedPrompt(prompt)
    texts, sources = await text.threads.handle_text(
        len(prompt), lambda: _split(prompt, field, service.limits.max_input_tokens)
    )
    if not sources:
        return RenderedPrompt(prompt)
    images = await _read(admission, reader, sources, salt)

    def joined() -> str:
        shown = (text.template.image_text(image.placeholder).replace(image.placeholder, image.text) for image in images)
        return "".join(chain.from_iterable(zip_longest(texts, shown, fillvalue="")))

    return RenderedPrompt(await text.threads.handle_text(len(prompt), joined), images=images)


def _split(prompt: str, field: str, most: int) -> tuple[list[str], list[ImageSource]]:
    """Splits a prompt into the texts between images, and the images. Raises ContextOverflow for more than `most`."""
    texts: list[str] = []
    sources: list[ImageSource] = []
    end = 0
    for found in _MARKDOWN.finditer(prompt):
        if not found[2]:
            continue
        texts.append(prompt[end : found.start()])
        end = found.end()
        sources.append(ImageSource(found[1], field))
        if len(sources) > most:
            raise ContextOverflow.of_prompt(len(sources), most, at_least=True)
    texts.append(prompt[end:])
    return texts, sources
