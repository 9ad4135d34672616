"""The prefix cache: finds KV blocks that were computed before, by the tokens that a prompt begins with.

It is a radix tree over tokens. A node is split where two token strings begin to differ, even inside a block: both
halves then hold the block on the boundary. A node's first block always has all tokens of the path from the block's
beginning on. So if parent and child both hold a block of the same index, the child's block has more of the path, and
any prefix of a path can be read from the blocks of its deepest node.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from tgi_server.router.scheduling.blocks import BlockPool

_WIDTH = 4  # bytes of a token

# (adapter key, cache namespace). Texts in different spaces share nothing, even if they are equal.
Space = tuple[str, str]


@dataclass(slots=True, eq=False)
class _Node:
    """A node of the radix tree, with the edge that leads to it.

    tokens: the edge's tokens, 4 bytes each. start: number of tokens before the edge on its path. blocks: the KV blocks
    with the edge's tokens. fresh_from, fresh_in: tokens from position `fresh_from` on are computed by the call with the
    number `fresh_in`, and so can be used by later calls only. space: of a root, the space of the texts below it.
    """

    parent: "_Node | None"
    start: int
    tokens: bytearray
    blocks: list[int]
    fresh_from: int
    fresh_in: int
    children: "dict[bytes, _Node]" = field(default_factory=dict)
    last_used: int = 0
    queued: bool = False
    space: Space = "", ""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // _WIDTH

    def usable(self, call: int) -> int:
        """Returns how many of the edge's tokens the call with this number may use."""
        return len(self.tokens) // _WIDTH if self.fresh_in < call else self.fresh_from - self.start


@dataclass(slots=True)
class Match:
    """A cached prefix of a prompt.

    tokens: its length. blocks: the blocks that hold it. pending: number of further tokens that the call being built
    computes for another sequence. unusable: number of further tokens that are cached, but have to be computed again
    because there is no state snapshot after them.
    """

    tokens: int = 0
    pending: int = 0
    blocks: list[int] = field(default_factory=list)
    unusable: int = 0


class PrefixCache:
    """Holds blocks of `pool`, and evicts the least recently used ones on demand, from the leaves upwards.

    A leaf that ends with a block in use is kept, as evicting it frees nothing. Only when all other idle blocks are
    used up, and some are above such leaves, these leaves are evicted, too. So every idle block can be freed.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[Space, _Node] = {}  # none without children
        self._call = 1
        self._clock = 0
        self._order = count()
        self._leaves: list[tuple[int, int, _Node]] = []  # heap of (last used, tie breaker, leaf)
        self._parked: dict[int, _Node] = {}  # leaves that cannot be evicted, by the block in use that is their last

    def sent(self) -> None:
        """Records that the call being built has been sent: later calls may use the tokens that it computes."""
        self._call += 1

    def match(self, space: Space, tokens: bytes) -> Match:
        """Returns the longest cached prefix of `tokens` (4 bytes each) in a space. Marks it as used."""
        match = Match()
        size = self._block_size
        for node, shared in self._walk(space, tokens):
            usable = 0 if match.pending else min(shared, node.usable(self._call))
            if usable:
                first = node.start // size
                match.blocks[first:] = node.blocks[: -(-(node.start + usable) // size) - first]
                match.tokens += usable
            match.pending += shared - usable
        return match

    def continuation(self, space: Space, tokens: bytes, most: int) -> bytes:
        """Returns the tokens that followed `tokens` when they were cached last: at most `most`, 4 bytes each."""
        node, matched = None, 0
        for node, shared in self._walk(space, tokens):
            matched = node.start + shared
        if node is None or matched * _WIDTH < len(tokens):
            return b""
        following = node.tokens[(matched - node.start) * _WIDTH :]
        while len(following) < most * _WIDTH and node.children:
            # Among children used at the same time, the younger: when it was split off, the older was only passed.
            node = max(reversed(node.children.values()), key=lambda child: child.last_used)
            following += node.tokens
        return bytes(following[: most * _WIDTH])

    def insert(self, space: Space, tokens: bytes, blocks: list[int], *, fresh: bool = False) -> None:
        """Caches tokens of a sequence. fresh: True if the call being built computes the last of them.

        tokens: 4 bytes each. blocks: the sequence's block table; its first blocks hold the tokens.
        """
        node, matched = self._root(space), 0
        for child, shared in self._walk(space, tokens):
            node, matched = child, child.start + shared
            if matched < child.end:
                node = self._split(child, matched)
        end = len(tokens) // _WIDTH
        if matched < end:
            holding = blocks[matched // self._block_size : -(-end // self._block_size)]
            self._append(node, tokens[matched * _WIDTH :], holding, self._call if fresh else 0)

    def released(self, idle: list[int]) -> None:
        """Records that no sequence holds these cached blocks any more."""
        for block in idle:
            leaf = self._parked.pop(block, None)
            if leaf is not None:
                self._offer(leaf)

    def evict(self, blocks: int) -> None:
        """Frees at least this many idle blocks, or all if there are fewer."""
        goal = self._pool.free + blocks
        while self._pool.free < goal and (self._leaves or self._uncover_idle()):
            used, _, leaf = heapq.heappop(self._leaves)
            leaf.queued = False
            if leaf.children or not leaf.blocks:
                continue  # it got children or was removed after it was queued
            if used != leaf.last_used:
                self._offer(leaf)
            else:
                self._trim(leaf, goal)

    def spaces(self) -> list[Space]:
        """Returns the spaces that have cached texts."""
        return list(self._roots)

    def forget(self, space: Space) -> None:
        """Deletes all texts of a space."""
        while (node := self._roots.get(space)) is not None:
            while node.children:
                node = next(iter(node.children.values()))
            self._cut_off(node)

    def check(self) -> Counter[int]:
        """Returns how often each block is held. Raises AssertionError if the tree is inconsistent."""
        held: Counter[int] = Counter()
        size = self._block_size
        queued = {id(leaf) for _, _, leaf in self._leaves}
        parked = {id(leaf) for leaf in self._parked.values()}
        for node in self._nodes():
            held.update(node.blocks)
            assert len(node.tokens) > 0, "an edge without tokens"
            assert len(node.blocks) == -(-node.end // size) - node.start // size, "blocks do not cover the edge"
            assert node.parent is not None, "a node outside the tree"
            assert node.parent.children[bytes(node.tokens[:_WIDTH])] is node, "a child under another token"
            assert not node.parent.blocks or node.parent.end == node.start, "a gap on the path"
            assert node.parent.last_used >= node.last_used, "a parent was used less recently than its child"
            if not node.children:
                assert id(node) in queued or id(node) in parked, "a leaf that cannot be evicted"
        for root in self._roots.values():
            assert root.children, "a root without a tree"
        for block, leaf in self._parked.items():
            assert not leaf.children, "a parked node is not a leaf"
            assert leaf.blocks[-1:] == [block], "a leaf is parked under a block that is not its last"
            assert self._pool.users[block], "a leaf is parked though it can be evicted"
        return held

    def _root(self, space: Space) -> _Node:
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = _Node(None, 0, bytearray(), [], 0, 0, space=space)
        return root

    def _nodes(self) -> Iterator[_Node]:
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            pending += node.children.values()
            yield node

    def _walk(self, space: Space, tokens: bytes) -> Iterator[tuple[_Node, int]]:
        """Yields the nodes on the path of `tokens`, and how many tokens of each edge match. Marks the nodes as used."""
        self._clock += 1
        node = self._roots.get(space)
        if node is None:
            return
        node.last_used = self._clock
        position = 0
        while child := node.children.get(tokens[position : position + _WIDTH]):
            child.last_used = self._clock
            shared = common_prefix(child.tokens, tokens, position)
            whole = shared == len(child.tokens)
            yield child, shared // _WIDTH
            if not whole:
                return
            position += shared
            node = child

    def _split(self, node: _Node, at: int) -> _Node:
        """Puts a new node above `node`, which keeps the tokens from position `at` on. Returns the new node."""
        size = self._block_size
        cut = (at - node.start) * _WIDTH
        first = node.start // size
        assert node.parent is not None
        upper = _Node(
            node.parent,
            node.start,
            node.tokens[:cut],
            node.blocks[: -(-at // size) - first],
            min(node.fresh_from, at),
            node.fresh_in,
            last_used=node.last_used,
        )
        node.parent.children[bytes(node.tokens[:_WIDTH])] = upper
        upper.children[bytes(node.tokens[cut : cut + _WIDTH])] = node
        if at % size:
            self._pool.cache([node.blocks[at // size - first]])
        node.parent = upper
        del node.tokens[:cut]
        del node.blocks[: at // size - first]
        node.start = at
        node.fresh_from = max(node.fresh_from, at)
        return upper

    def _append(self, node: _Node, tokens: bytes, blocks: list[int], fresh_in: int) -> None:
        """Continues the path that ends with `node`: extends its edge if it is a leaf, else adds a new leaf.

        blocks: the blocks that hold `tokens`; the first may also hold tokens of `node`.
        """
        self._unpark(node)
        position = node.end
        boundary = position % self._block_size != 0
        if node.blocks and not node.children and (not boundary or node.blocks[-1] == blocks[0]):
            added = blocks[1:] if boundary else blocks
            if node.fresh_in < fresh_in:
                node.fresh_from, node.fresh_in = position, fresh_in
            node.tokens += tokens
            node.blocks += added
            leaf = node
        else:
            added = blocks
            leaf = _Node(node, position, bytearray(tokens), blocks, position, fresh_in, last_used=self._clock)
            node.children[tokens[:_WIDTH]] = leaf
        self._pool.cache(added)
        self._offer(leaf)

    def _unpark(self, node: _Node) -> None:
        if node.blocks and self._parked.get(node.blocks[-1]) is node:
            del self._parked[node.blocks[-1]]

    def _offer(self, leaf: _Node) -> None:
        if not leaf.queued:
            leaf.queued = True
            heapq.heappush(self._leaves, (leaf.last_used, next(self._order), leaf))

    def _trim(self, leaf: _Node, goal: int) -> None:
        """Evicts the leaf's blocks from its end, until the pool has `goal` free blocks, or a block is in use."""
        pool, size = self._pool, self._block_size
        while pool.free < goal:
            last = leaf.blocks[-1]
            if pool.users[last]:
                self._parked[last] = leaf
                return
            if len(leaf.blocks) == 1:
                self._cut_off(leaf)
                return
            del leaf.tokens[((leaf.end - 1) // size * size - leaf.start) * _WIDTH :]
            leaf.blocks.pop()
            pool.uncache((last,))
        self._offer(leaf)

    def _uncover_idle(self) -> bool:
        """Removes leaves in use that are below idle blocks. Returns True if there are leaves to evict afterwards."""
        covering = [leaf for leaf in self._parked.values() if self._covers_idle(leaf)]
        for leaf in covering:
            self._cut_off(leaf)
        return bool(self._leaves)

    def _covers_idle(self, leaf: _Node) -> bool:
        users = self._pool.users
        node: _Node | None = leaf
        while node is not None:
            if not all(users[block] for block in node.blocks):
                return True
            node = node.parent
        return False

    def _cut_off(self, leaf: _Node) -> None:
        """Removes a leaf from the tree. Its parent may become a leaf."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[bytes(leaf.tokens[:_WIDTH])]
        self._unpark(leaf)
        self._pool.uncache(leaf.blocks)
        leaf.blocks = []
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.space]
        else:
            self._offer(parent)


def common_prefix(edge: bytes | bytearray, tokens: bytes, offset: int) -> int:
    """Returns the length in bytes of the common prefix, in whole tokens, of `edge` and `tokens[offset:]`.

    Compares slices by bisection: a long prompt costs a few memory comparisons, not a loop over tokens.
    """
    low, high = 0, min(len(edge), len(tokens) - offset)
    if edge[:high] == tokens[offset : offset + high]:
        return high
    while high - low > _WIDTH:
        middle = low + (high - low) // (2 * _WIDTH) * _WIDTH
        if edge[low:middle] == tokens[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    return low
