"""LoRA adapters: small fine-tunes of a base model, as `peft` writes them."""

from tgi_server.engine.lora.adapter import AdapterLayer
from tgi_server.engine.lora.base_model import BaseLayer, BaseModel
from tgi_server.engine.lora.peft_config import PeftConfig
from tgi_server.engine.lora.reader import read_adapter

__all__ = ["AdapterLayer", "BaseLayer", "BaseModel", "PeftConfig", "read_adapter"]
