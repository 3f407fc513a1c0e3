"""Which models are made of dense layers, and can be trained without automatic differentiation."""

from functools import lru_cache

from torch import nn

# A layer's parameter names: weight (out, in) and bias (out,).
Layer = tuple[str, str]


@lru_cache(maxsize=8)
def dense_layers(model: nn.Module) -> list[Layer]:
    """Return the layers of a Sequential of Flatten, Linear and then (ReLU, Linear) pairs; of other models none.

    A subclass may have a forward pass of its own, a layer may be there twice, hooks and tied weights change what is
    computed: none of them are dense layers here.
    """
    children = list(model._modules.items()) if type(model) is nn.Sequential else []
    kinds = [type(layer) for _, layer in children]
    if kinds[:2] != [nn.Flatten, nn.Linear] or kinds[2:] != [nn.ReLU, nn.Linear] * (len(kinds) // 2 - 1):
        return []
    flatten = children[0][1]
    if flatten.start_dim != 1 or flatten.end_dim != -1 or any(map(is_changed, model.modules())):
        return []
    layers = [(f"{name}.weight", f"{name}.bias") for name, _ in children[1::2]]
    # Not where biases lack, where weights are tied, or where they follow from others.
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    return layers if names == [name for layer in layers for name in layer] else []


def is_changed(layer: nn.Module) -> bool:
    """Tell whether a layer computes something else than its class: it has a hook, or a forward pass of its own."""
    hooks = (
        layer._forward_pre_hooks,
        layer._forward_hooks,
        layer._backward_pre_hooks,
        layer._backward_hooks,
    )
    return any(hooks) or "forward" in vars(layer)
