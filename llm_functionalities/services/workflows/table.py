"""The workflows by their gRPC services."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from llm_functionalities.services.context import ModelClient
from llm_functionalities.services.workflows import (
    chit_chat,
    description,
    execution_search,
    proactive_question,
    replacement,
    summary,
)
from llm_functionalities.services.workflows.workflow import Workflow, run
from shared.stubs import llm_pb2_grpc

# Each function returns the workflow of a request. It has the name of its method in `llm.proto`.
WORKFLOWS: Mapping[str, Sequence[Callable[[Any], Workflow[Any]]]] = {
    "LLMChitChat": (chit_chat.generate_chit_chat,),
    "LLMSummaryGeneration": (summary.generate_summary, summary.generate_summaries),
    "LLMDescriptionGeneration": (description.generate_description, description.generate_descriptions),
    "LLMProactiveQuestionGeneration": (proactive_question.generate_proactive_question,),
    "LLMReplacementGeneration": (
        replacement.generate_replacement,
        replacement.rewrite_steps,
        replacement.adjust_step_texts,
    ),
    "LLMExecutionSearchManager": (execution_search.generate_decision,),
}


def add_workflows(model: ModelClient, server: Any) -> None:
    """Adds the services of all workflows to a gRPC server."""
    for service, methods in WORKFLOWS.items():
        servicer = SimpleNamespace(**{method.__name__: partial(run, method, model) for method in methods})
        getattr(llm_pb2_grpc, f"add_{service}Servicer_to_server")(servicer, server)
