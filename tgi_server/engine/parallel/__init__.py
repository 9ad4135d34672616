"""Tensor parallelism: one model over several processes, each with its own slices of the weights."""

from tgi_server.engine.parallel.group import ShardGroup, connect, fault_of_any, share_cores

__all__ = ["ShardGroup", "connect", "fault_of_any", "share_cores"]
