"""The command `oatmill`: serves a model, shows both services at work, chats with a server, checks a machine."""
