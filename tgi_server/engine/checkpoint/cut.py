"""The shard of a model: modules with the shapes of its share, and layers that bring results together."""

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tgi_server.engine.checkpoint.reader import Checkpoint, SlicedTensor
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel
from tgi_server.engine.parallel.group import ShardGroup
from tgi_server.engine.parallel.layers import VocabParallelHead
from tgi_server.engine.parallel.plan import ShardingPlan
from tgi_server.engine.parallel.shares import Share, vocabulary


class LocalConfig:
    """A model's configuration as one of its attention modules sees it: with the heads of this shard."""

    def __init__(self, config: PretrainedConfig, share: Share) -> None:
        self._config = config
        self.num_attention_heads = len(share.queries)
        self.num_key_value_heads = len(share.keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def check_vocabulary(model: PreTrainedModel, tensors: Checkpoint, plan: ShardingPlan) -> None:
    """Raises InvalidWeights for a tensor of another number of tokens than config.json says.

    The slices of shards are as long as the longest, so that they may fit where the whole tensor does not.
    """
    for name, parameter in model.state_dict().items():
        slice_, tensor = plan.slice(name), tensors.get(name)
        if slice_ is None or slice_.layout is not vocabulary or not isinstance(tensor, SlicedTensor):
            continue
        if (shape := tensor.whole_shape) != tuple(parameter.shape):
            raise InvalidWeights(
                f"shapes differ from config.json: {name} is {list(shape)}, not {list(parameter.shape)}"
            )


def cut(model: nn.Module, plan: ShardingPlan, share: Share, config: PretrainedConfig) -> None:
    """Gives every module parameters of the shard's shapes, before it has weights.

    model: a whole one, or a part of it. Raises UnsupportedModel for a matrix that the plan does not mention.
    """
    for path, module in model.named_modules():
        if plan.is_attention(path):
            _share_heads(module, plan.share(path, share))
        for name, parameter in list(module.named_parameters(recurse=False)):
            slice_ = plan.slice(f"{path}.{name}")
            if slice_ is not None:
                shape = slice_.shape(share, tuple(parameter.shape))
                setattr(module, name, nn.Parameter(parameter.new_empty(shape), parameter.requires_grad))
            elif parameter.dim() > 1 and not plan.is_whole(path):
                raise UnsupportedModel(
                    f"this {config.model_type} model cannot be split over several shards: "
                    f"its plan does not say how to split {path}.{name}"
                )
        if (split := plan.split(path)) is not None:
            _count_features(module)
            for name, layout in split.sizes.items():
                setattr(module, name, sum(map(len, layout(share, getattr(module, name)))))


def _share_heads(attention: Any, share: Share) -> None:
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = len(share.queries) // len(share.keys)
    if hasattr(attention, "config"):
        attention.config = LocalConfig(attention.config, share)
    attention.share = share


def _count_features(module: Any) -> None:
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
        module.padding_idx = None  # may be a token of another shard
    elif hasattr(module, "nf"):
        module.nf = module.weight.shape[1]
    elif hasattr(module, "intermediate_dim"):
        module.intermediate_dim = module.down_proj.shape[_expert_axis(module)]


def _expert_axis(module: Any) -> int:
    """Returns the axis of down_proj, [experts, ...], that has the intermediate features."""
    return 2 if module.down_proj.shape[1] == module.hidden_dim else 1


def surround(model: nn.Module, plan: ShardingPlan, share: Share, group: ShardGroup, config: PretrainedConfig) -> None:
    """Puts layers that bring results together around the modules of a model, or of a part, that need them."""
    vocab_size = config.get_text_config(decoder=True).vocab_size
    for path, module in list(model.named_modules()):
        split = plan.split(path)
        if split is None:
            continue
        for name, buffer in list(module.named_buffers(recurse=False)):  # they were computed, not read
            if (slice_ := split.tensors.get(name)) is not None:
                setattr(module, name, slice_.of(buffer, share))
        if split.layer is None:
            continue
        layer = split.layer(module, group, share)
        if isinstance(layer, VocabParallelHead):
            layer.vocab_size = vocab_size
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
