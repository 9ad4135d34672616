from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_NONE: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_EOS_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
FINISH_REASON_NONE: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_EOS_TOKEN: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason
FINISH_REASON_DEADLINE: FinishReason

class LauncherMessage(_message.Message):
    __slots__ = ("join", "start", "stop", "failed")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    join: NodeJoin
    start: int
    stop: bool
    failed: str
    def __init__(self, join: _Optional[_Union[NodeJoin, _Mapping]] = ..., start: _Optional[int] = ..., stop: _Optional[bool] = ..., failed: _Optional[str] = ...) -> None: ...

class NodeJoin(_message.Message):
    __slots__ = ("node", "nodes", "shards")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    node: int
    nodes: int
    shards: int
    def __init__(self, node: _Optional[int] = ..., nodes: _Optional[int] = ..., shards: _Optional[int] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("prefill", "decode", "filter_batch", "clear_cache", "answered")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    FILTER_BATCH_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    prefill: PrefillRequest
    decode: DecodeRequest
    filter_batch: FilterBatchRequest
    clear_cache: ClearCacheRequest
    answered: int
    def __init__(self, prefill: _Optional[_Union[PrefillRequest, _Mapping]] = ..., decode: _Optional[_Union[DecodeRequest, _Mapping]] = ..., filter_batch: _Optional[_Union[FilterBatchRequest, _Mapping]] = ..., clear_cache: _Optional[_Union[ClearCacheRequest, _Mapping]] = ..., answered: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("step", "filter_batch", "clear_cache", "failure")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FILTER_BATCH_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    step: StepResponse
    filter_batch: FilterBatchResponse
    clear_cache: ClearCacheResponse
    failure: Failure
    def __init__(self, step: _Optional[_Union[StepResponse, _Mapping]] = ..., filter_batch: _Optional[_Union[FilterBatchResponse, _Mapping]] = ..., clear_cache: _Optional[_Union[ClearCacheResponse, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ("probe",)
    PROBE_FIELD_NUMBER: _ClassVar[int]
    probe: SharedBytes
    def __init__(self, probe: _Optional[_Union[SharedBytes, _Mapping]] = ...) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("model_id", "revision", "model_type", "dtype", "device_type", "world_size", "vocab_size", "max_position_embeddings", "eos_token_ids", "paged", "encoder_decoder", "block_size", "bos_token_id", "decoder_start_token_id", "speculate", "grammars", "quantization", "linear_kernels", "limits", "capacity", "kv_cache_dtype", "run_is_open", "running_sequences", "states", "images", "no_images", "whole_images", "shares_memory", "forward_pass", "encoders", "encoders_only", "weight_bytes")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAGED_FIELD_NUMBER: _ClassVar[int]
    ENCODER_DECODER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DECODER_START_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    LINEAR_KERNELS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    RUN_IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    NO_IMAGES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_IMAGES_FIELD_NUMBER: _ClassVar[int]
    SHARES_MEMORY_FIELD_NUMBER: _ClassVar[int]
    FORWARD_PASS_FIELD_NUMBER: _ClassVar[int]
    ENCODERS_FIELD_NUMBER: _ClassVar[int]
    ENCODERS_ONLY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    revision: str
    model_type: str
    dtype: str
    device_type: str
    world_size: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    paged: bool
    encoder_decoder: bool
    block_size: int
    bos_token_id: int
    decoder_start_token_id: int
    speculate: int
    grammars: bool
    quantization: str
    linear_kernels: str
    limits: WarmupRequest
    capacity: WarmupResponse
    kv_cache_dtype: str
    run_is_open: bool
    running_sequences: int
    states: bool
    images: bool
    no_images: str
    whole_images: bool
    shares_memory: bool
    forward_pass: str
    encoders: _containers.RepeatedCompositeFieldContainer[Encoder]
    encoders_only: bool
    weight_bytes: int
    def __init__(self, model_id: _Optional[str] = ..., revision: _Optional[str] = ..., model_type: _Optional[str] = ..., dtype: _Optional[str] = ..., device_type: _Optional[str] = ..., world_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_position_embeddings: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., paged: _Optional[bool] = ..., encoder_decoder: _Optional[bool] = ..., block_size: _Optional[int] = ..., bos_token_id: _Optional[int] = ..., decoder_start_token_id: _Optional[int] = ..., speculate: _Optional[int] = ..., grammars: _Optional[bool] = ..., quantization: _Optional[str] = ..., linear_kernels: _Optional[str] = ..., limits: _Optional[_Union[WarmupRequest, _Mapping]] = ..., capacity: _Optional[_Union[WarmupResponse, _Mapping]] = ..., kv_cache_dtype: _Optional[str] = ..., run_is_open: _Optional[bool] = ..., running_sequences: _Optional[int] = ..., states: _Optional[bool] = ..., images: _Optional[bool] = ..., no_images: _Optional[str] = ..., whole_images: _Optional[bool] = ..., shares_memory: _Optional[bool] = ..., forward_pass: _Optional[str] = ..., encoders: _Optional[_Iterable[_Union[Encoder, _Mapping]]] = ..., encoders_only: _Optional[bool] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class Encoder(_message.Message):
    __slots__ = ("task", "model_id", "folder", "model_type", "dtype", "vocab_size", "max_tokens", "columns", "labels", "answers", "pooling", "weight_bytes")
    TASK_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    task: str
    model_id: str
    folder: str
    model_type: str
    dtype: str
    vocab_size: int
    max_tokens: int
    columns: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    answers: bool
    pooling: str
    weight_bytes: int
    def __init__(self, task: _Optional[str] = ..., model_id: _Optional[str] = ..., folder: _Optional[str] = ..., model_type: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_tokens: _Optional[int] = ..., columns: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., answers: _Optional[bool] = ..., pooling: _Optional[str] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("task", "inputs", "dimensions", "normalize", "target_gap_ms")
    TASK_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_GAP_MS_FIELD_NUMBER: _ClassVar[int]
    task: str
    inputs: _containers.RepeatedCompositeFieldContainer[EncodeInput]
    dimensions: int
    normalize: bool
    target_gap_ms: float
    def __init__(self, task: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EncodeInput, _Mapping]]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., target_gap_ms: _Optional[float] = ...) -> None: ...

class EncodeInput(_message.Message):
    __slots__ = ("ids", "second")
    IDS_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    second: int
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., second: _Optional[int] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("values", "columns")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    columns: int
    def __init__(self, values: _Optional[bytes] = ..., columns: _Optional[int] = ...) -> None: ...

class EncodeImagesRequest(_message.Message):
    __slots__ = ("images", "target_gap_ms")
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    TARGET_GAP_MS_FIELD_NUMBER: _ClassVar[int]
    images: _containers.RepeatedCompositeFieldContainer[Image]
    target_gap_ms: float
    def __init__(self, images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., target_gap_ms: _Optional[float] = ...) -> None: ...

class EncodeImagesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeFilesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeFilesResponse(_message.Message):
    __slots__ = ("layout", "block_bytes", "snapshot_bytes")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    layout: bytes
    block_bytes: int
    snapshot_bytes: int
    def __init__(self, layout: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ...) -> None: ...

class PrefixFile(_message.Message):
    __slots__ = ("path", "before", "digests", "block_ids", "first", "snapshot")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    path: str
    before: bytes
    digests: bytes
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    first: int
    snapshot: int
    def __init__(self, path: _Optional[str] = ..., before: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., block_ids: _Optional[_Iterable[int]] = ..., first: _Optional[int] = ..., snapshot: _Optional[int] = ...) -> None: ...

class StoreFileResponse(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class LoadFileResponse(_message.Message):
    __slots__ = ("bytes", "read_ns")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_NS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    read_ns: int
    def __init__(self, bytes: _Optional[int] = ..., read_ns: _Optional[int] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("grammars",)
    GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    grammars: bool
    def __init__(self, grammars: _Optional[bool] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("released_bytes",)
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    released_bytes: int
    def __init__(self, released_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceDiscoveryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceDiscoveryResponse(_message.Message):
    __slots__ = ("urls", "grammar_urls")
    URLS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_URLS_FIELD_NUMBER: _ClassVar[int]
    urls: _containers.RepeatedScalarFieldContainer[str]
    grammar_urls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, urls: _Optional[_Iterable[str]] = ..., grammar_urls: _Optional[_Iterable[str]] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WarmupRequest(_message.Message):
    __slots__ = ("max_prefill_tokens", "max_batch_size", "max_total_tokens", "max_batch_total_tokens", "adapter_bytes")
    MAX_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_prefill_tokens: int
    max_batch_size: int
    max_total_tokens: int
    max_batch_total_tokens: int
    adapter_bytes: int
    def __init__(self, max_prefill_tokens: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_batch_total_tokens: _Optional[int] = ..., adapter_bytes: _Optional[int] = ...) -> None: ...

class WarmupResponse(_message.Message):
    __slots__ = ("num_blocks", "max_total_tokens", "max_batch_total_tokens", "fallbacks", "num_snapshots", "max_batch_size", "max_prefill_tokens")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    max_total_tokens: int
    max_batch_total_tokens: int
    fallbacks: _containers.RepeatedScalarFieldContainer[str]
    num_snapshots: int
    max_batch_size: int
    max_prefill_tokens: int
    def __init__(self, num_blocks: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_batch_total_tokens: _Optional[int] = ..., fallbacks: _Optional[_Iterable[str]] = ..., num_snapshots: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., max_prefill_tokens: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("adapter_id", "folder", "check_only")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    CHECK_ONLY_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    folder: str
    check_only: bool
    def __init__(self, adapter_id: _Optional[str] = ..., folder: _Optional[str] = ..., check_only: _Optional[bool] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("rank", "bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    bytes: int
    def __init__(self, rank: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("adapter_id",)
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    def __init__(self, adapter_id: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ("do_sample", "temperature", "top_k", "top_p", "typical_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "watermark", "logit_bias", "min_tokens", "late_tokens", "count_penalty")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    DO_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNT_PENALTY_FIELD_NUMBER: _ClassVar[int]
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    typical_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    watermark: bool
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    late_tokens: _containers.RepeatedScalarFieldContainer[int]
    count_penalty: float
    def __init__(self, do_sample: _Optional[bool] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., watermark: _Optional[bool] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., late_tokens: _Optional[_Iterable[int]] = ..., count_penalty: _Optional[float] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("type", "value", "text", "lenient", "frame")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REGEX: _ClassVar[Grammar.Type]
        JSON_SCHEMA: _ClassVar[Grammar.Type]
        LARK: _ClassVar[Grammar.Type]
    REGEX: Grammar.Type
    JSON_SCHEMA: Grammar.Type
    LARK: Grammar.Type
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LENIENT_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    type: Grammar.Type
    value: str
    text: str
    lenient: _containers.RepeatedScalarFieldContainer[str]
    frame: str
    def __init__(self, type: _Optional[_Union[Grammar.Type, str]] = ..., value: _Optional[str] = ..., text: _Optional[str] = ..., lenient: _Optional[_Iterable[str]] = ..., frame: _Optional[str] = ...) -> None: ...

class ThoughtBudget(_message.Message):
    __slots__ = ("tokens", "begin", "end", "closing", "open", "repeats")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    begin: str
    end: str
    closing: _containers.RepeatedScalarFieldContainer[int]
    open: bool
    repeats: bool
    def __init__(self, tokens: _Optional[int] = ..., begin: _Optional[str] = ..., end: _Optional[str] = ..., closing: _Optional[_Iterable[int]] = ..., open: _Optional[bool] = ..., repeats: _Optional[bool] = ...) -> None: ...

class CompileRequest(_message.Message):
    __slots__ = ("grammar", "size", "pin", "leniency", "released", "client")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    LENIENCY_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    grammar: Grammar
    size: int
    pin: int
    leniency: int
    released: _containers.RepeatedScalarFieldContainer[int]
    client: str
    def __init__(self, grammar: _Optional[_Union[Grammar, _Mapping]] = ..., size: _Optional[int] = ..., pin: _Optional[int] = ..., leniency: _Optional[int] = ..., released: _Optional[_Iterable[int]] = ..., client: _Optional[str] = ...) -> None: ...

class CompileResponse(_message.Message):
    __slots__ = ("error", "size", "unenforced", "leniency")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    UNENFORCED_FIELD_NUMBER: _ClassVar[int]
    LENIENCY_FIELD_NUMBER: _ClassVar[int]
    error: str
    size: int
    unenforced: _containers.RepeatedScalarFieldContainer[str]
    leniency: int
    def __init__(self, error: _Optional[str] = ..., size: _Optional[int] = ..., unenforced: _Optional[_Iterable[str]] = ..., leniency: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "input_ids", "generated_ids", "sampling", "max_new_tokens", "ignore_eos", "logprobs", "top_n_tokens", "prefill_logprobs", "grammar", "adapter_id", "thought_budget", "closing", "scored_token_ids", "prefill_top_n", "block_ids", "cached_tokens", "copy", "trace_context", "snapshot", "earlier_reply", "images")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    THOUGHT_BUDGET_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    SCORED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOP_N_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EARLIER_REPLY_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    id: int
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    generated_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParameters
    max_new_tokens: int
    ignore_eos: bool
    logprobs: bool
    top_n_tokens: int
    prefill_logprobs: bool
    grammar: Grammar
    adapter_id: str
    thought_budget: ThoughtBudget
    closing: bool
    scored_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prefill_top_n: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: int
    copy: BlockCopy
    trace_context: _containers.ScalarMap[str, str]
    snapshot: int
    earlier_reply: _containers.RepeatedScalarFieldContainer[int]
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, id: _Optional[int] = ..., input_ids: _Optional[_Iterable[int]] = ..., generated_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[bool] = ..., top_n_tokens: _Optional[int] = ..., prefill_logprobs: _Optional[bool] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., adapter_id: _Optional[str] = ..., thought_budget: _Optional[_Union[ThoughtBudget, _Mapping]] = ..., closing: _Optional[bool] = ..., scored_token_ids: _Optional[_Iterable[int]] = ..., prefill_top_n: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[int] = ..., copy: _Optional[_Union[BlockCopy, _Mapping]] = ..., trace_context: _Optional[_Mapping[str, str]] = ..., snapshot: _Optional[int] = ..., earlier_reply: _Optional[_Iterable[int]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("digest", "start", "length", "tensors")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    start: int
    length: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, digest: _Optional[bytes] = ..., start: _Optional[int] = ..., length: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "data", "shared")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    shared: SharedBytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., shared: _Optional[_Union[SharedBytes, _Mapping]] = ...) -> None: ...

class SharedBytes(_message.Message):
    __slots__ = ("process", "descriptor", "inode", "start", "size")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    process: int
    descriptor: int
    inode: int
    start: int
    size: int
    def __init__(self, process: _Optional[int] = ..., descriptor: _Optional[int] = ..., inode: _Optional[int] = ..., start: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class BlockCopy(_message.Message):
    __slots__ = ("source", "target", "tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: int
    target: int
    tokens: int
    def __init__(self, source: _Optional[int] = ..., target: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("request_id", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    tokens: int
    def __init__(self, request_id: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("request_id", "block_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StateSave(_message.Message):
    __slots__ = ("request_id", "length", "snapshot")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    length: int
    snapshot: int
    def __init__(self, request_id: _Optional[int] = ..., length: _Optional[int] = ..., snapshot: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("batch_id", "requests", "chunks", "grants", "decode", "closing", "saves")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    decode: bool
    closing: _containers.RepeatedScalarFieldContainer[int]
    saves: _containers.RepeatedCompositeFieldContainer[StateSave]
    def __init__(self, batch_id: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., decode: _Optional[bool] = ..., closing: _Optional[_Iterable[int]] = ..., saves: _Optional[_Iterable[_Union[StateSave, _Mapping]]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("batch_id", "grants", "closing", "saves")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    closing: _containers.RepeatedScalarFieldContainer[int]
    saves: _containers.RepeatedCompositeFieldContainer[StateSave]
    def __init__(self, batch_id: _Optional[int] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., closing: _Optional[_Iterable[int]] = ..., saves: _Optional[_Iterable[_Union[StateSave, _Mapping]]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("generations", "timings", "drafted_tokens", "accepted_tokens")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedCompositeFieldContainer[Generation]
    timings: Timings
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, generations: _Optional[_Iterable[_Union[Generation, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("forward_ns", "sampling_ns", "total_ns")
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    forward_ns: int
    sampling_ns: int
    total_ns: int
    def __init__(self, forward_ns: _Optional[int] = ..., sampling_ns: _Optional[int] = ..., total_ns: _Optional[int] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs", "top_tokens", "finish_reason", "prefill_tokens", "hidden", "error", "drafted")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_tokens: _containers.RepeatedCompositeFieldContainer[TopTokens]
    finish_reason: FinishReason
    prefill_tokens: PrefillTokens
    hidden: _containers.RepeatedScalarFieldContainer[int]
    error: str
    drafted: bool
    def __init__(self, request_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_tokens: _Optional[_Iterable[_Union[TopTokens, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., prefill_tokens: _Optional[_Union[PrefillTokens, _Mapping]] = ..., hidden: _Optional[_Iterable[int]] = ..., error: _Optional[str] = ..., drafted: _Optional[bool] = ...) -> None: ...

class TopTokens(_message.Message):
    __slots__ = ("ids", "logprobs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PrefillTokens(_message.Message):
    __slots__ = ("ids", "logprobs", "top_tokens")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_tokens: _containers.RepeatedCompositeFieldContainer[TopTokens]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_tokens: _Optional[_Iterable[_Union[TopTokens, _Mapping]]] = ...) -> None: ...

class FilterBatchRequest(_message.Message):
    __slots__ = ("batch_id", "keep_request_ids")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    keep_request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch_id: _Optional[int] = ..., keep_request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FilterBatchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("batch_id",)
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    def __init__(self, batch_id: _Optional[int] = ...) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
