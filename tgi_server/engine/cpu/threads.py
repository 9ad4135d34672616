"""How many threads a small model is worth."""

import logging

import torch
from torch import nn

logger = logging.getLogger(__name__)

SMALL_LAYER_BYTES = 1 << 20
"""Below this a linear layer is done before a second thread has joined in: some 50 microseconds of memory traffic."""


def limit_threads(model: nn.Module) -> None:
    """Makes this process compute in one thread when the model's linear layers are small.

    Threads that meet after every such layer win nothing on an idle machine, and on a busy one each meeting waits for
    the slowest. Call it before the weights are packed.
    """
    sizes = [module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear)]
    if sizes and sum(sizes) / len(sizes) < SMALL_LAYER_BYTES and torch.get_num_threads() > 1:
        logger.info("the model is small: it runs in one thread")
        torch.set_num_threads(1)
