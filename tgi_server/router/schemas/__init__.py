"""The JSON that crosses HTTP: TGI's names, types and nullability, with OpenAI's where they go further."""
