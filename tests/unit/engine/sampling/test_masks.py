"""Masks of several grammars at once, computed beside a model that leaves cores alone, and before one that does not."""

from collections.abc import Iterator

import pytest
import torch

from shared.control_groups import usable_cores
from tests.grammars import demo_compiler
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.engine.sampling.masks import MaskBuilder


@pytest.fixture(params=["a core to spare", "no core to spare"])
def builder(request) -> Iterator[MaskBuilder]:
    before, cores = torch.get_num_threads(), usable_cores()
    if request.param == "a core to spare" and cores == 1:
        pytest.skip("there is one core")
    torch.set_num_threads(cores - 1 if request.param == "a core to spare" else cores)
    yield MaskBuilder(torch.device("cpu"), spare_cores=0)
    torch.set_num_threads(before)


def test_each_mask_allows_what_may_follow_in_its_own_text(builder) -> None:
    compiler = demo_compiler()
    size = compiler.tokenizer.lookup.vocab_size
    wishes = [("[ab]x?", "a", True), ("[ab]x?", "a", False), ("yes|no", "", False), ("[0-9]{3}", "12", False)]
    expected = [{"x"}, {"x", None}, {"y", "n"}, set("0123456789")]
    constraints = []
    for pattern, begun, ignore_eos in wishes:
        tokens = compiler.tokenizer.encode(begun)
        compiler.check(Grammar(GrammarKind.REGEX, pattern))
        constraint = compiler.constraint(Grammar(GrammarKind.REGEX, pattern), tokens, 50, ignore_eos=ignore_eos)
        constraints.append(constraint)
    mask = builder.start(constraints, [3, 0, 1, 2], size).wait()
    assert mask.positions == [3, 0, 1, 2]
    for row, first_letters in zip(mask.bits.tolist(), expected, strict=True):
        allowed = [token for token in range(size) if row[token // 32] >> (token % 32) & 1]
        seen = {
            None if token in compiler.tokenizer.eos else compiler.tokenizer.lookup.decode_bytes([token]).decode()[:1]
            for token in allowed
        }
        assert seen == first_letters
