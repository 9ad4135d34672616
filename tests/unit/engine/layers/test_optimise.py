import weakref

from torch import nn

from tgi_server.engine.layers.optimise import _replace


def test_a_layer_that_is_replaced_is_freed_before_the_next_one_is_made() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    layers = [weakref.ref(layer) for layer in model]
    left: list[int] = []

    def replacement(_: nn.Module) -> nn.Module:
        left.append(sum(layer() is not None for layer in layers))
        return nn.Identity()

    _replace(model, replacement)
    assert left == [3, 2, 1]
