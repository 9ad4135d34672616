"""A process that decodes images and runs the image processor of a model's family on them.

    python -m tgi_server.router.media.worker FOLDER MOST_PIXELS LEAST_SHARED

It reads tasks from its standard input and writes a result for each to its standard output. Tensors that have at least
LEAST_SHARED bytes together are left in shared memory; -1: none are. Broken and hostile files can
end it; the router starts another.
"""

import importlib
import json
import os
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from shared.pipes import own_pipes, read, receive, send
from tgi_server.router.media import torchvision_part
from tgi_server.router.media.messages import ImageArray, ImageResult, ImageTask, UnusableImage
from tgi_server.router.media.sizes import scans
from tgi_server.shared_bytes import SharedMemory

# The formats that are decoded. Pillow knows more, with decoders that few use.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_STILL = frozenset({"JPEG", "MPO", "BMP"})
# Maximum number of scans of a JPEG; encoders use about ten.
_MOST_SCANS = 100
# The longest edge of an image with the detail `low`, as OpenAI has it.
_LOW_DETAIL = 512
# Image processors that `transformers` has for torchvision only, by model_type.
_WITH_TORCH = {"lfm2_vl": "Lfm2VlImageProcessor", "llama4": "Llama4ImageProcessor"}
# Bytes of an array that is worth a page of shared memory.
_LEAST_PART = 4_096
# Niceness of the process, so that text streams come first.
_NICENESS = 10


def decoded(data: bytes, most_pixels: int) -> Image.Image:
    """Returns the image in a file, upright and in RGB, as `transformers` loads it. Raises UnusableImage."""
    Image.MAX_IMAGE_PIXELS = None  # the bound below is the one that holds
    try:
        image: Image.Image = Image.open(BytesIO(data), formats=_FORMATS)
        width, height = image.size
        if width * height > most_pixels:
            raise UnusableImage(
                f"it has {width}x{height} pixels; at most {most_pixels} are decoded (--max-image-pixels)"
            )
        if (found := scans(data)) > _MOST_SCANS:
            raise UnusableImage(f"it has {found} scans or more; at most {_MOST_SCANS} are decoded")
        if image.format not in _STILL and getattr(image, "is_animated", False):
            raise UnusableImage("it is animated; send one frame")
        image.load()
        image = ImageOps.exif_transpose(image)
        return image.convert("RGB")
    except UnidentifiedImageError:
        raise UnusableImage("it is not a JPEG, PNG, WebP, GIF or BMP") from None
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, IndexError, KeyError, TypeError) as error:
        raise UnusableImage(f"its file is broken: {error}") from None


def load_processor(folder: Path) -> Any:
    """Returns the processor of a model that reads images, without what it has for videos."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in _WITH_TORCH:
        # Other image processors have versions that need NumPy alone; torch would take seconds and much memory.
        sys.modules["torch"] = None  # type: ignore[assignment]
    import transformers
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from transformers.models.pixtral import image_processing_pil_pixtral
    from transformers.models.smolvlm import processing_smolvlm

    # Pixtral's imports the version for torchvision, for a function that the other has, too.
    sys.modules["transformers.models.pixtral.image_processing_pixtral"] = image_processing_pil_pixtral
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    transformers.PixtralProcessor = transformers.models.pixtral.PixtralProcessor = PixtralProcessor
    # Video processors need torchvision, and SmolVLM's spells the number of their frames with another package.
    processing_smolvlm.num2words = str
    AutoVideoProcessor.from_pretrained = classmethod(lambda *_, **__: None)
    transformers.ProcessorMixin.check_argument_for_proper_class = lambda *_: None
    if kind in _WITH_TORCH:
        torchvision_part.install()
        module = importlib.import_module(f"transformers.models.{kind}.image_processing_{kind}")
        own = getattr(module, _WITH_TORCH[kind])
        transformers.AutoImageProcessor.from_pretrained = own.from_pretrained
    processor = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
    if getattr(processor, "image_token", None) is None:
        raise ValueError(f"{type(processor).__name__} has no placeholder for images")
    return processor


def processed(processor: Any, image: Image.Image, detail: str) -> tuple[str, Mapping[str, np.ndarray[Any, Any]]]:
    """Returns the text of an image's tokens, and its tensors. Raises UnusableImage."""
    if detail == "low":
        image.thumbnail((_LOW_DETAIL, _LOW_DETAIL))
    try:
        made = processor(
            text=[processor.image_token],
            images=[image],
            return_tensors="np" if sys.modules["torch"] is None else "pt",
            return_text_replacement_offsets=True,
        )
    except Exception as error:  # processors refuse images by errors of any kind
        raise UnusableImage(
            f"the model's image processor does not take its {image.width}x{image.height} pixels: {error}"
        ) from None
    ((replacement,),) = made["text_replacement_offsets"]
    names = [
        name for name in made if not name.startswith(("input_ids", "attention_mask", "token_type", "mm_token", "text_"))
    ]
    return replacement["replacement"], {name: _plain(made[name], mask=name.endswith("_mask")) for name in names}


def _plain(found: Any, *, mask: bool) -> np.ndarray[Any, Any]:
    """Returns an array in a dtype of `contract.Tensor`. found: an array, or a tensor, which may be of bfloat16.

    mask: it has a 0 or a 1 for each pixel or patch, a byte each instead of eight.
    """
    array = np.asarray(found.float() if hasattr(found, "is_floating_point") and found.is_floating_point() else found)
    if array.dtype.kind == "f":
        return np.ascontiguousarray(array, dtype="<f4")
    if array.dtype.kind in "iu" and not mask:
        return np.ascontiguousarray(array, dtype="<i8")
    return np.ascontiguousarray(array, dtype="bool")


def serve(folder: Path, most_pixels: int, least_shared: int, tasks: BinaryIO, results: BinaryIO) -> None:
    """Processes images. The first result says that it has begun. Raises EOFError when there are no more tasks.

    least_shared: from this many bytes on the tensors of an image are left in shared memory; -1: they are always sent.
    """
    try:
        processor = load_processor(folder)
    except Exception as error:
        send(results, ImageResult(error=f"{type(error).__name__}: {error}"))
        return
    send(results, ImageResult(placeholder=processor.image_token))
    while True:
        task = receive(tasks, ImageTask)
        try:
            text, arrays = processed(processor, decoded(read(tasks, task.size), most_pixels), task.detail)
        except UnusableImage as error:
            send(results, ImageResult(error=str(error)))
            continue
        result = ImageResult(placeholder=processor.image_token, text=text)
        shares = 0 <= least_shared <= sum(array.nbytes for array in arrays.values())
        _write_arrays(result, arrays, _LEAST_PART if shares else None, tasks, results)
        del arrays  # while it waits for the next task


def _write_arrays(
    result: ImageResult,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    least: int | None,
    tasks: BinaryIO,
    results: BinaryIO,
) -> None:
    """Writes a result and its arrays, and returns when the router has them.

    least: minimum bytes of an array that is left in shared memory; None: all arrays are sent.
    """
    large = [name for name, each in arrays.items() if least is not None and each.nbytes >= least]
    shared = dict(zip(large, SharedMemory.of([arrays[name].data for name in large]), strict=True)) if large else {}
    for name, each in arrays.items():
        start = shared[name].start if name in shared else None
        result.arrays.append(ImageArray(name, str(each.dtype), each.shape, each.nbytes, start))
    for each_shared in shared.values():
        result.descriptor, result.inode = each_shared.place.descriptor, each_shared.place.inode
    sent = [each.data.cast("B") if each.nbytes else b"" for name, each in arrays.items() if name not in shared]
    send(results, result, *sent)
    if shared:
        read(tasks, 1)


def main() -> None:
    os.nice(_NICENESS)
    with suppress(EOFError):
        serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *own_pipes())


if __name__ == "__main__":
    main()
