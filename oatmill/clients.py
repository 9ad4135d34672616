"""Variables that point clients at a server."""

from shlex import quote

from tgi_server.launcher.machine import authority
from tgi_server.launcher.settings import LauncherSettings

# Addresses on which a server listens on every interface.
_ANY_ADDRESS = frozenset({"0.0.0.0", "::"})
_NAME = "oatmill"


def local_url(settings: LauncherSettings) -> str:
    """Returns the server's URL for clients on this machine."""
    host = "127.0.0.1" if settings.hostname in _ANY_ADDRESS else settings.hostname
    return f"http://{authority(host, settings.port)}"


def variables(settings: LauncherSettings) -> str:
    """Returns variables and flags for `claude`, `codex` and clients of OpenAI's API; nothing for embedding models."""
    if not settings.generates:
        return ""
    url = local_url(settings)
    key = "YOUR_KEY" if settings.api_keys else "unused"
    model = quote(next(iter(settings.served_model_name), settings.model_id))
    provider = f'{{name="{_NAME}", base_url="{url}/v1", wire_api="responses", env_key="OPENAI_API_KEY"}}'
    return (
        "clients on this machine:\n"
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}\n"
        f"  ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={model} claude\n"
        f"  codex -m {model} -c model_provider={_NAME} -c 'model_providers.{_NAME}={provider}'"
    )
