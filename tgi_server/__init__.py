"""A text-generation server with TGI's interface: launcher, router, shards, engine."""
