"""LoRA adapters: small fine-tunes of a base model, as `peft` writes them."""

from tgi_server.engine.adapters.adapter import AdapterLayer, AdapterWeights
from tgi_server.engine.adapters.base_model import BaseLayer, BaseModel
from tgi_server.engine.adapters.merge import merge_adapter
from tgi_server.engine.adapters.peft_config import PeftConfig
from tgi_server.engine.adapters.reader import read_adapter

__all__ = ["AdapterLayer", "AdapterWeights", "BaseLayer", "BaseModel", "PeftConfig", "merge_adapter", "read_adapter"]
