"""Ways to ask for text of a certain form."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field, RootModel

from tgi_server.router.schemas.base import RequestModel
from tgi_server.router.schemas.validation import BY_TYPE


class JsonSchemaConfig(RequestModel):
    model_config = ConfigDict(serialize_by_alias=True)

    harmless: ClassVar[frozenset[str]] = frozenset({"description"})

    name: str | None = Field(default=None, description="A name for the schema.")
    definition: Annotated[dict[str, Any] | bool, BY_TYPE] = Field(alias="schema", description="The JSON schema itself.")
    strict: bool | None = Field(
        default=None,
        description="Refuse a schema that cannot be enforced as a whole. Unset: yes in `value`, no in `json_schema`.",
    )


class JsonGrammar(RequestModel):
    type: Literal["json", "json_object"]
    value: Any = Field(
        default=None,
        validation_alias=AliasChoices("value", "schema"),
        description="A JSON schema, as an object or as a string; without one, any object. Also called `schema`.",
    )


class JsonSchemaGrammar(RequestModel):
    """Both TGI's form (the schema in `value`) and OpenAI's (in `json_schema`)."""

    type: Literal["json_schema"]
    value: JsonSchemaConfig | None = None
    json_schema: JsonSchemaConfig | None = None


class RegexGrammar(RequestModel):
    type: Literal["regex"]
    value: str


class LarkGrammar(RequestModel):
    type: Literal["lark"]
    value: str = Field(description="A context-free grammar in llguidance's dialect of Lark.")


class PlainText(RequestModel):
    """OpenAI's way to request text of any form."""

    type: Literal["text"]


_AnyGrammar = JsonGrammar | JsonSchemaGrammar | RegexGrammar | LarkGrammar | PlainText


class GrammarType(RootModel[Annotated[_AnyGrammar, BY_TYPE]]):
    model_config = ConfigDict(strict=True, frozen=True)
