"""Reports of other servers' users, reproduced with small inputs: where each report comes from, and its tests here."""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Report(NamedTuple):
    """source: the report's address, or the project and the feature that it is about. tests: FILE::FUNCTION."""

    kind: str
    source: str
    tests: tuple[str, ...]


REPORTS = (
    Report(
        "adapters of the language model of a model that reads images",
        "https://github.com/vllm-project/vllm/issues/21500, https://github.com/illuin-tech/colpali/issues/424",
        (
            "tests/unit/engine/lora/test_image_families.py::test_an_adapter_of_the_language_model_answers_as_peft_does",
            "tests/unit/engine/lora/test_image_families.py::test_names_may_have_the_prefixes_of_any_wrapper",
            "tests/integration/launcher/test_image_adapters.py::"
            "test_broken_adapters_are_refused_with_the_reason_and_a_stream_beside_them_ends_whole",
        ),
    ),
    Report(
        "a turn ends at any of llama.cpp's end tokens, not only at the file's eos_token_id",
        "llama.cpp, end-of-generation tokens of GGUF files",
        ("tests/unit/gguf/test_tokenizer.py::test_ends_of_generation_are_those_of_llama_cpp",),
    ),
    Report(
        "GGUF marks whose token type is normal or unused",
        "https://github.com/ggml-org/llama.cpp/issues/23183",
        ("tests/unit/gguf/test_tokenizer.py::test_tokens_that_look_like_marks_are_control_tokens",),
    ),
    Report(
        "tokens that only tokenizer_config.json or added_tokens.json adds",
        "transformers, added_tokens_decoder",
        ("tests/unit/grammar/test_added_tokens.py::test_ids_are_those_of_transformers",),
    ),
    Report(
        "bits and groups that differ by layer",
        "https://github.com/vllm-project/vllm/issues/15665, https://github.com/intel/auto-round/issues/773",
        (
            "tests/unit/engine/checkpoint/quantized/test_formats.py::test_weights_are_read_as_what_they_stand_for",
            "tests/unit/engine/checkpoint/quantized/test_formats.py::test_tokens_are_those_of_the_dense_weights",
        ),
    ),
    Report(
        "a single allowed token",
        "vLLM, allowed_token_ids",
        ("tests/integration/structured/test_generate.py::test_one_allowed_token_is_generated_to_the_end",),
    ),
    Report(
        "a value's closing tag on the value's own line",
        "vLLM, the tool parser of Qwen3-Coder",
        ("tests/unit/router/answers/test_formats.py::test_tags_stand_on_lines_of_their_own_or_not",),
    ),
    Report(
        "a tool's result without a name, where the template needs one",
        "OpenAI's chat completions, messages of the role tool",
        ("tests/unit/router/text/test_conversation.py::test_a_tools_result_has_the_name_of_the_call_with_its_id",),
    ),
    Report(
        "null within objects",
        "OpenAI's and Anthropic's SDKs, optional fields",
        ("tests/unit/router/schemas/test_base.py::test_null_omits_a_field_at_any_depth",),
    ),
    Report(
        "an earlier answer with thoughts alone",
        "OpenAI's chat completions, content: null",
        ("tests/unit/router/schemas/test_chat.py::test_a_message_says_something_in_one_of_its_forms",),
    ),
    Report(
        "thoughts that the client began",
        "vLLM, continue_final_message with a reasoning parser",
        ("tests/integration/router/test_chat.py::test_thoughts_that_the_client_began",),
    ),
    Report(
        "vLLM's forms of /tokenize, Jina's of /rerank",
        "vLLM, the tokenizer API and the rerank API",
        (
            "tests/integration/router/test_tokenize.py::test_tokens_of_a_prompt_in_vllms_form",
            "tests/integration/router/test_tokenize.py::test_tokens_of_a_conversation_in_vllms_form",
            "tests/integration/router/test_encoders.py::test_rerank_of_jina_and_cohere",
        ),
    ),
    Report(
        "GGUF files that rotate a part of each head, and parts of a file under other names",
        "llama.cpp, rope.dimension_count and split files",
        (
            "tests/unit/gguf/test_file.py::test_metadata_that_make_no_model_are_told",
            "tests/unit/gguf/test_file.py::test_a_part_under_another_name_is_told",
        ),
    ),
    Report(
        "settings of checkpoints that lead to a traceback",
        "compressed-tensors, weights: null; ModelOpt, hf_quant_config.json; transformers, rope and pad_token_id",
        (
            "tests/unit/engine/checkpoint/test_load_model.py::test_settings_that_cannot_be_are_reported_in_one_line",
            "tests/unit/engine/checkpoint/quantized/test_recognition.py::test_modelopt_says_it_in_a_file_of_its_own",
        ),
    ),
    Report(
        "prompts of booleans and of fractions",
        "OpenAI's completions, prompt",
        ("tests/unit/router/schemas/test_completions.py::test_a_value_of_another_type_is_refused",),
    ),
    Report(
        "vectors that are not to be normalised",
        "text-embeddings-inference, normalize: false",
        ("tests/integration/router/test_encoders.py::test_embed_of_tei",),
    ),
    Report(
        "thoughts in a stream without a signature",
        "Anthropic's Messages, signature_delta",
        (
            "tests/integration/router/test_anthropic_client.py::"
            "test_a_stream_has_pings_and_the_signature_of_its_thoughts",
        ),
    ),
    Report(
        "schemas without type and without additionalProperties",
        "text-generation-inference, the guide to Guidance",
        ("tests/unit/router/answers/test_schema_reading.py::test_objects_are_closed_unless_they_are_opened",),
    ),
    Report(
        "a host name of the environment that no name server knows",
        "text-generation-inference, HOSTNAME",
        ("tests/unit/launcher/test_cli.py::test_a_host_name_of_the_environment_that_is_not_known_means_all_addresses",),
    ),
)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.kind)
def test_a_report_has_tests(report: Report) -> None:
    for node in report.tests:
        file, _, name = node.partition("::")
        functions = ast.walk(ast.parse((ROOT / file).read_text()))
        assert name in {each.name for each in functions if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
