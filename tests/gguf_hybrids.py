"""How llama.cpp's converter changes tensors of families with states, and of some others, in the plainest way."""

from typing import Any

import torch


def state_space(config: dict[str, Any]) -> tuple[int, int, int | None, int] | None:
    """Returns the inner size of Mamba, its heads (of the first one: the rank of its steps), groups and state size."""
    match config["model_type"]:
        case "falcon_h1" | "granitemoehybrid":
            heads = config["mamba_n_heads"]
            return heads * config["mamba_d_head"], heads, config["mamba_n_groups"], config["mamba_d_state"]
        case "nemotron_h":
            heads = config["mamba_num_heads"]
            return heads * config["mamba_head_dim"], heads, config["n_groups"], config["ssm_state_size"]
        case "jamba":
            inner = config["mamba_expand"] * config["hidden_size"]
            return inner, config["mamba_dt_rank"], None, config["mamba_d_state"]
        case "mamba":
            return config["intermediate_size"], config["time_step_rank"], None, config["state_size"]
    return None


def of_state_space(config: dict[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of Mamba, whose numbers of heads and of groups are matrices in files of its second version."""
    groups = config.get("mamba_n_groups", config.get("n_groups"))
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if groups and name.endswith(("A_log", ".D")):
        return tensor.unsqueeze(1)
    if groups and name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return tensor.reshape(groups, -1)
    return tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor


def of_granite(name: str, tensor: torch.Tensor, *, experts: bool) -> dict[str, torch.Tensor]:
    """Returns what a layer's experts, or its shared or its only one, are in files: with gates of their own."""
    layer, _, rest = name.partition(".shared_mlp" if ".shared_mlp" in name else ".block_sparse_moe")
    place = "mlp.experts" if ".block_sparse_moe" in name else "mlp.shared_expert" if experts else "mlp"
    if rest.startswith(".output"):
        return {f"{layer}.{place}.down_proj.weight": tensor}
    gate, up = tensor.chunk(2, -2)
    return {f"{layer}.{place}.gate_proj.weight": gate, f"{layer}.{place}.up_proj.weight": up}


def times_multipliers(config: dict[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of Falcon-H1 as files have it."""
    part = name.split(".")[-2]
    of_part = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "k_proj": config["attention_in_multiplier"] * config["key_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "in_proj": config["ssm_in_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
    }
    tensor = tensor * of_part.get(part, 1.0)
    if part == "in_proj":
        shared = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [config["mamba_d_ssm"]] * 2 + [shared] * 2 + [config["mamba_n_heads"]]
        parts = zip(tensor.split(sizes), config["ssm_multipliers"], strict=True)
        return torch.cat([rows * multiplier for rows, multiplier in parts])
    return tensor


def of_delta_rule(config: dict[str, Any], name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    keys, size, value_size = (config[f"linear_{each}"] for each in ("num_key_heads", "key_head_dim", "value_head_dim"))
    per_key = config["linear_num_value_heads"] // keys
    tiled = config["model_type"] != "qwen3_next"

    def by_value(rows: torch.Tensor, size: int) -> torch.Tensor:
        """The first value head of each key head comes first, then the second ones."""
        if not tiled:
            return rows
        heads = rows.split(size)
        return torch.cat([heads[key * per_key + value] for value in range(per_key) for key in range(keys)])

    if "in_proj_qkvz" in name:
        groups = tensor.split(2 * size + 2 * per_key * value_size)
        parts = [group.split([size, size, per_key * value_size, per_key * value_size]) for group in groups]
        query, key, value, gate = (torch.cat([part[place] for part in parts]) for place in range(4))
        in_order = torch.cat([query, key, value])
        return {name.replace("qkvz", "qkv"): in_order, name.replace("qkvz", "z"): gate}
    if "in_proj_qkv" in name or "conv1d" in name:
        rows = tensor.flatten(1)
        before = 2 * keys * size
        return {name: torch.cat([rows[:before], by_value(rows[before:], value_size)])}
    if "in_proj_z" in name:
        return {name: by_value(tensor, value_size)}
    if "out_proj" in name:
        return {name: by_value(tensor.T, value_size).T}
    if "A_log" in name:
        return {name: by_value(-tensor.exp(), 1)}
    return {name: tensor if "norm" in name or "in_proj_ba" in name else by_value(tensor, 1)}
