"""Backends, which compute models: one for each kind of device, chosen here."""

from transformers import PreTrainedModel

from tgi_server.engine.backends.base import Backend, PagedModel, PassInput
from tgi_server.engine.config import EngineConfig

__all__ = ["Backend", "PagedModel", "PassInput", "create_backend"]


def create_backend(model: PreTrainedModel, config: EngineConfig, *, alone: bool = True) -> Backend:
    """Returns the backend of the device that a model of `transformers` is on; plain torch without custom kernels.

    alone: True unless the model drafts for a larger one in this process. Raises UnsupportedModel for kernels that the
    device does not have.
    """
    if config.custom_kernels and model.device.type == "cuda":
        from tgi_server.engine.backends.cuda import CudaBackend

        return CudaBackend(model, config)
    if config.custom_kernels and model.device.type == "cpu":
        from tgi_server.engine.backends.cpu import CpuBackend

        return CpuBackend(model, config, alone=alone)
    from tgi_server.engine.backends.plain import PlainBackend

    return PlainBackend(model, config)
