"""What an assistant that guides a person through a task asks of a model."""

from tools.demo_model.workflows import company, decisions, replacements, steps, structures, summaries

SOURCES = (
    *summaries.SOURCES,
    *replacements.SOURCES,
    *company.SOURCES,
    *decisions.SOURCES,
    *steps.SOURCES,
    *structures.SOURCES,
)
