"""Settings of `text-generation-server`: one class for each command, built from classes that the launcher uses, too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ByteSize, Field, NonNegativeInt, field_validator, model_validator
from pydantic_settings import CliPositionalArg

from shared.settings import CommaSeparated, LogLevel, RefusedSetting, ServiceSettings, synonyms
from tgi_server import demo_model
from tgi_server.contract import MOST_DRAFTED, Task
from tgi_server.hub_ids import HubId, read_hub_id

# The values of --quantize that are allowed for a checkpoint with a `quant_method`.
QUANTIZE_OF_METHOD: Mapping[str, tuple[str, ...]] = {
    "awq": ("awq",),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes-fp4", "bitsandbytes-nf4"),
    "compressed-tensors": ("compressed-tensors", "fp8"),
    "fbgemm-fp8": ("fp8",),
    "fp8": ("fp8",),
    "gptq": ("gptq", "marlin"),
    "mxfp4": (),
}
# The values of --quantize that quantize weights while loading, with the maximum bytes per weight.
ROUNDED_BYTES: Mapping[str, float] = {
    "bitsandbytes": 1.0,
    "bitsandbytes-fp4": 0.5,
    "bitsandbytes-nf4": 0.5,
    "eetq": 1.0,
    "fp8": 1.0,
    "int4": 0.5,
    "int8": 1.0,
}
QUANTIZE = (
    *sorted({name for names in QUANTIZE_OF_METHOD.values() for name in names} - set(ROUNDED_BYTES)),
    *ROUNDED_BYTES,
)
IN_CONFIG_ONLY = RefusedSetting("not supported yet; set rope_parameters in the model's config.json")


class CheckpointSettings(ServiceSettings):
    """Settings of all commands and of the launcher that identify the model, except its id."""

    help_groups: ClassVar[Mapping[str, str]] = {
        "revision": "Model",
        "json_output": "Logs and traces",
        "trust_remote_code": "Model",
    }

    revision: str | None = Field(None, description="branch, tag or commit of the model on the hub")
    gguf_file: str | None = Field(
        None, description="GGUF file to load, if the folder or repository of the model has several"
    )
    tokenizer_name: HubId | None = Field(
        None,
        description="folder or hub id of a tokenizer to use, with its chat template, in place of the model's own",
    )
    json_output: bool = Field(False, description="write log lines as JSON objects")
    trust_remote_code: bool = Field(False, description="run the Python code that comes with the model")

    @model_validator(mode="before")
    @classmethod
    def _reads_addresses(cls, values: Any) -> Any:
        """Converts the URL of a model's page, or of its GGUF file, to model id and revision."""
        if not isinstance(values, dict) or not isinstance(given := values.get("model_id"), str):
            return values
        model_id, revision = read_hub_id(given)
        if revision is None:
            return values | {"model_id": model_id}
        if values.get("revision") not in (None, revision):
            raise ValueError(f"{given} and --revision name different revisions; leave one of them out")
        return values | {"model_id": model_id, "revision": revision}


class ModelSettings(CheckpointSettings):
    """Settings of a shard and of the launcher that control how the model is loaded and computed."""

    help_groups: ClassVar[Mapping[str, str]] = {
        "dtype": "Weights and kernels",
        "cpu_memory": "Memory",
        "cuda_graphs": "Weights and kernels",
        "embedding_model_id": "Embeddings and ranking",
        "speculate": "Speculation",
        "watermark_gamma": "Watermark",
        "otlp_endpoint": "Logs and traces",
        "rope_scaling": "Model",
        "max_lora_rank": "Adapters",
    }

    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        synonyms({"auto": None, "half": "float16", "float": "float32"}),
    ] = Field(
        None,
        description="data type of weights and activations; half means float16, float means float32; default, or auto: "
        "the checkpoint's",
    )
    quantize: Annotated[
        str | None,
        RefusedSetting(
            f"must be one of {', '.join(QUANTIZE)}; for other formats use a GPTQ checkpoint", harmless=QUANTIZE
        ),
    ] = Field(
        None,
        description="quantize the weights while loading: int4, int8, fp8, eetq, bitsandbytes, bitsandbytes-nf4 or "
        "bitsandbytes-fp4; the format of a quantized checkpoint is recognized without this flag",
    )
    kv_cache_dtype: Annotated[
        Literal["fp8_e4m3fn", "fp8_e5m2"] | None,
        synonyms({"auto": None, "fp8": "fp8_e4m3fn", "fp8_e4m3": "fp8_e4m3fn"}),
    ] = Field(
        None,
        description="store the KV cache in 8 bits, so that twice the tokens fit; keys, or keys and values, stay in "
        "dtype if 8 bits would raise the perplexity by more than 1 %; fp8 means fp8_e4m3fn; default, or auto: dtype",
    )
    linear_kernels: str | None = Field(
        None,
        description="kernels of linear layers on a CPU, such as fma or fma,fma_dequant@32 (the second for 32 or more "
        "rows); w4a16: 4-bit weights with inputs in 16 bits instead of 8; default: by kind of CPU, from a table in the "
        "repository",
    )
    packed_weights_cache: Path | None = Field(
        None,
        description="folder where a start on a CPU stores quantized weights in the layout of the kernels, for "
        "faster later starts; none: do not store them; default: ~/.cache/oatmill/packed",
    )
    numa: str | None = Field(
        None,
        description="keep each shard on the cores of one NUMA node, so that its weights and KV cache are in the memory "
        "of that node: auto, or the cores of each node, such as 0-63;64-127; --num-shard must be the number of nodes, "
        "or a multiple of it",
    )
    disable_custom_kernels: bool = Field(False, description="compute with torch and transformers only")
    cpu_memory: ByteSize | None = Field(
        None, gt=0, description="memory for the KV cache on a CPU, such as 4GiB; default: 30 % of the free memory"
    )
    image_memory: ByteSize = Field(
        ByteSize(256 << 20),
        ge=0,
        description="memory for outputs of the vision tower, such as 512MiB, which are reused when an image is sent "
        "again; 0: do not load the tower, and refuse images; default: 256MiB",
    )
    cuda_memory_fraction: float = Field(1.0, gt=0, le=1, description="fraction of a GPU's memory to use")
    cuda_graphs: CommaSeparated[NonNegativeInt] | None = Field(
        None, description="batch sizes to capture CUDA graphs for; 0: no graphs; default: sizes up to max-batch-size"
    )
    cuda_all_reduce: Literal["auto", "nccl", "symmetric-memory"] = Field(
        "auto",
        description="all-reduce among the GPUs of one machine; nccl: always NCCL; symmetric-memory: small tensors "
        "through memory that all GPUs read, if a test at load gives the same sums as NCCL; auto: the same, but a "
        "failed test is not reported as a fallback; not yet tested on several GPUs",
    )

    embedding_model_id: HubId | None = Field(
        None,
        description="model for /v1/embeddings and /embed, in addition to model-id, or alone if model-id is not set; a "
        "local folder, a GGUF file, or an id of the hub",
    )
    rerank_model_id: HubId | None = Field(
        None,
        description="model for /rerank, /v1/rerank, /v2/rerank and /predict; in the forms of embedding-model-id",
    )

    speculate: NonNegativeInt = Field(
        0,
        le=MOST_DRAFTED,
        description=f"maximum number of draft tokens per sequence and step, up to {MOST_DRAFTED}; without "
        "speculative-model they come from the prompt and earlier answers. Default: 0; 4 with speculative-model; with "
        "Medusa heads, one per head",
    )
    speculative_model: HubId | None = Field(
        None,
        description="draft model: a small model with the same tokenizer, Medusa heads, or EAGLE-3; a local "
        "folder, or an id of the hub",
    )

    watermark_gamma: float = Field(0.5, gt=0, lt=1, description="fraction of the vocabulary that a watermark favors")
    watermark_delta: float = Field(2.0, ge=0, le=100, description="bonus added to the logits of favored tokens")

    otlp_endpoint: str | None = Field(None, description="OpenTelemetry collector (gRPC); default: no tracing")

    rope_scaling: Annotated[str | None, IN_CONFIG_ONLY] = None
    rope_factor: Annotated[float | None, IN_CONFIG_ONLY] = None
    max_lora_rank: int = Field(256, ge=1, le=256, description="largest rank of an adapter")


class CommandSettings(CheckpointSettings):
    """Settings of every command."""

    help_groups: ClassVar[Mapping[str, str]] = {"model_id": "Model", "logger_level": "Logs and traces"}

    model_id: CliPositionalArg[str] = Field(
        str(demo_model.PATH),
        description="a local folder or GGUF file, or an id of the hub; default: the bundled demo model",
    )
    logger_level: LogLevel = Field("INFO", description="lowest severity to log")


class ShardSettings(CommandSettings, ModelSettings):
    """Serves one shard of a model on a Unix socket, for the router."""

    uds_path: Path = Field(
        Path("/tmp/text-generation-server"),  # noqa: S108
        description="the shard listens on the Unix socket UDS_PATH-RANK",
    )
    sharded: bool = Field(False, description="this is one of several shards; needs RANK and WORLD_SIZE")
    rank: int = Field(0, ge=0, description="number of this shard, from 0")
    world_size: int = Field(1, ge=1, description="number of shards")
    local_rank: int | None = Field(
        None, ge=0, description="number of this shard among those on this machine, from 0; default: RANK"
    )
    local_world_size: int | None = Field(
        None, ge=1, description="number of shards on this machine; default: WORLD_SIZE"
    )
    listen_address: str | None = Field(
        None, description="also listen on a port of this address, for a router on another machine"
    )
    master_addr: str = Field("localhost", description="address where the shards connect to each other")
    master_port: int = Field(29500, gt=0, lt=65536, description="port where the shards connect to each other")

    otlp_service_name: str = Field("text-generation-inference.server", description="service name in traces")
    log_name: str | None = Field(None, description="name of the process in the log; default: shard-RANK")

    @property
    def process_name(self) -> str:
        """Returns the name of the process in the log."""
        return self.log_name or f"shard-{self.rank}"

    @property
    def encoders(self) -> dict[Task, str]:
        """Returns the models that embed and rank, by task."""
        models: dict[Task, str | None] = {"embed": self.embedding_model_id, "rank": self.rerank_model_id}
        return {task: model for task, model in models.items() if model}

    @property
    def generates(self) -> bool:
        """Returns False if the model is an embedding or rerank model, and no other one is served."""
        return self.model_id not in self.encoders.values()

    @model_validator(mode="after")
    def _knows_its_place(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"RANK is {self.rank}, so WORLD_SIZE must be more than {self.world_size}")
        if self.world_size > 1 and not self.sharded:
            raise ValueError(f"WORLD_SIZE is {self.world_size}, which takes --sharded")
        if (self.local_world_size or 1) > self.world_size:
            raise ValueError(f"LOCAL_WORLD_SIZE is {self.local_world_size}, more than WORLD_SIZE, {self.world_size}")
        return self


class DownloadSettings(CommandSettings):
    """Fetches a model from the hub and converts its .bin weights to safetensors. Prints the model's folder."""

    extension: Literal[".safetensors", ".bin"] = Field(".safetensors", description="the kind of weight files")
    auto_convert: bool = Field(True, description="fetch and convert .bin files where there are no safetensors files")
    merge_lora: bool = Field(False, description="for an adapter: fetch its base model and merge the adapter into it")


def _number(value: object) -> object:
    """Converts the text of a command line or variable to an integer, which literals do not do."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class QuantizeSettings(CommandSettings):
    """Quantizes a model to 4 or 8 bits with GPTQ, into another folder. An interrupted run resumes where it stopped."""

    help_groups: ClassVar[Mapping[str, str]] = {"output_dir": "Settings"}

    model_id: CliPositionalArg[str] = Field(description="a local folder, or an id of the hub")
    output_dir: CliPositionalArg[Path] = Field(description="folder to write the quantized model to; it is created")
    bits: Annotated[Literal[4, 8], BeforeValidator(_number)] = Field(4, description="bits of a weight")
    groupsize: int = Field(128, description="number of inputs that share a scale; -1: all")
    percdamp: float = Field(0.01, gt=0, lt=1, description="fraction of the Hessian's mean diagonal added for stability")
    act_order: bool = Field(False, description="quantize the inputs with the largest activations first")
    calibration: Path | None = Field(
        None,
        description="text to calibrate with, like the text that the model will read: a text file, or JSONL with "
        "`text` in each line; default: English household advice",
    )
    samples: int = Field(128, gt=0, description="number of calibration samples")
    length: int = Field(512, gt=0, description="tokens of a calibration sample")
    upload_to_model_id: Annotated[
        str | None, RefusedSetting("not supported; upload the folder with `hf upload REPOSITORY FOLDER`")
    ] = None

    @field_validator("groupsize")
    @classmethod
    def _has_inputs(cls, size: int) -> int:
        if size < 1 and size != -1:
            raise ValueError("it must be at least 1, or -1 for one group of all inputs")
        return size
