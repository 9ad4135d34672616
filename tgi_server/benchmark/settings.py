"""Settings of `text-generation-benchmark`. Flags and variables are those of TGI's tool, and some more."""

import tempfile
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_settings import SettingsConfigDict

from shared.settings import CommaSeparated, ServiceSettings
from tgi_server.contract import SamplingParameters
from tgi_server.hub_ids import HubId

# TGI's launcher has its first shard listen here, and ours does with `--shard-uds-path /tmp/text-generation-server`.
USUAL_SOCKET = Path("/tmp/text-generation-server-0")  # noqa: S108

FORMATS = (".json", ".csv")


def _readable(path: Path) -> Path:
    if path.suffix not in FORMATS:
        raise ValueError(f"the name of the file must end with one of {', '.join(FORMATS)}")
    return path


class BenchmarkSettings(ServiceSettings):
    """Measures the speed of a running server's shards, for each combination of batch size, sequence length and decode
    length. It takes the router's place: running requests fail when the benchmark begins, and a request that comes
    meanwhile ends the case being measured."""

    model_config = SettingsConfigDict(
        cli_shortcuts={
            "tokenizer-name": "t",
            "batch-size": "b",
            "sequence-length": "s",
            "decode-length": "d",
            "runs": "r",
            "warmups": "w",
            "master-shard-uds-path": "m",
            "output": "o",
        }
    )

    master_shard_uds_path: Path | None = Field(
        None, description=f"socket of the first shard; default: {USUAL_SOCKET}, or that of the one running server"
    )
    tokenizer_name: HubId | None = Field(
        None, description="folder or hub id of a tokenizer to make prompts with; default: prompts of arbitrary tokens"
    )
    revision: str = Field("main", description="revision of the tokenizer on the hub")
    batch_size: CommaSeparated[PositiveInt] = Field(
        default=[], description="sequences in a batch; default: 1, 2, 4, 8, 16 and 32, as far as they fit"
    )
    sequence_length: CommaSeparated[PositiveInt] = Field(default=[10], description="tokens of each prompt")
    decode_length: CommaSeparated[PositiveInt] = Field(default=[8], description="tokens generated for each prompt")
    runs: PositiveInt = Field(10, description="measured runs of each case")
    warmups: NonNegativeInt = Field(1, description="unmeasured runs of each case before them")

    temperature: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="sample at this temperature; default: greedy decoding"
    )
    top_k: int | None = Field(None, gt=0, lt=2**31, description="sample among the k most likely tokens")
    top_p: float | None = Field(
        None, gt=0, le=1, description="sample among the most likely tokens of this total probability"
    )
    typical_p: float | None = Field(
        None, gt=0, le=1, description="sample among typical tokens of this total probability"
    )
    repetition_penalty: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="penalty on tokens that have occurred; 1: none"
    )
    frequency_penalty: float | None = Field(
        None, allow_inf_nan=False, description="penalty on tokens by how often they have occurred; 0: none"
    )
    watermark: bool = Field(False, description="watermark the generated tokens")
    do_sample: bool = Field(False, description="sample; temperature, top-k, top-p and typical-p imply it")
    top_n_tokens: int = Field(0, ge=0, lt=2**31, description="number of most likely tokens to report at each position")

    output: Annotated[Path, AfterValidator(_readable)] | None = Field(
        None, description="file for the results: .json or .csv"
    )
    plain: bool = Field(False, description="a line for each case in place of the screen; also without a terminal")
    yes: bool = Field(False, description="take the place of a connected router without asking, even if requests run")

    @model_validator(mode="after")
    def _lists_are_not_empty(self) -> Self:
        for name in ("sequence_length", "decode_length"):
            if not getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} is empty; give one length or several")
        return self

    def sampling(self) -> SamplingParameters:
        """Returns the parameters of every request; greedy decoding unless a setting says otherwise."""
        choices = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return SamplingParameters(
            do_sample=self.do_sample or any(value is not None for value in choices),
            temperature=self.temperature or 1.0,
            top_k=self.top_k or 0,
            top_p=self.top_p or 1.0,
            typical_p=self.typical_p or 1.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            watermark=self.watermark,
        )

    def sockets(self) -> list[Path]:
        """Returns the sockets on which the first shard may listen: the one that is named, the usual one, or others."""
        if self.master_shard_uds_path is not None:
            return [self.master_shard_uds_path]
        if USUAL_SOCKET.is_socket():
            return [USUAL_SOCKET]
        return sorted(Path(tempfile.gettempdir()).glob("text-generation-server-*/shard-0"))
