"""Shapes of models that have no file in models/ yet, as data, and of rows of measurements. No jax."""

from __future__ import annotations

from parallax.shape import LayerShape, ModelShape, Weight


def attention_weights(width: int, heads: int, kv_heads: int, head_size: int) -> tuple[Weight, ...]:
    """Queries, keys, values and output of grouped-query attention."""
    kv = Weight((width, kv_heads * head_size), ("embed", "kv_heads"))
    query, out = (
        Weight((width, heads * head_size), ("embed", "heads")),
        Weight((heads * head_size, width), ("heads", "embed")),
    )
    return query, kv, kv, out


def latent_attention_weights(
    width: int, heads: int, query_rank: int, kv_rank: int, rotary: int, plain: int, value: int
) -> tuple[Weight, ...]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries and keys/values by way of a
    low rank, with the rotary part of the keys shared by all heads."""
    return (
        Weight((width, query_rank), ("embed", "latent")),
        Weight((query_rank, heads * (plain + rotary)), ("latent", "heads")),
        Weight((width, kv_rank + rotary), ("embed", "latent")),
        Weight((kv_rank, heads * (plain + value)), ("latent", "heads")),
        Weight((heads * value, width), ("heads", "embed")),
        Weight((query_rank,), ("latent",)),
        Weight((kv_rank,), ("latent",)),
    )


def ff_weights(width: int, ff: int, matrices: int, experts: int = 0) -> tuple[Weight, ...]:
    """`matrices` 3: gate, up and down; 2: up and down. Of all experts together where there are any."""
    batch, axis = ((experts,), ("experts",)) if experts else ((), ())
    up = Weight((*batch, width, ff), (*axis, "embed", "ff"))
    return (*(up,) * (matrices - 1), Weight((*batch, ff, width), (*axis, "ff", "embed")))


def router_weights(width: int, experts: int) -> tuple[Weight, ...]:
    return (Weight((width, experts), ("embed", "router")),)


def norms(width: int, count: int = 2) -> tuple[Weight, ...]:
    return (Weight((width,), ("embed",)),) * count


def _outside(width: int, vocab_size: int) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    table = Weight((vocab_size, width), ("vocab", "embed"))
    return (table,), (*norms(width, 1), table)


def gpt_shape(
    layers: int, width: int, heads: int, kv_heads: int, ff: int, vocab_size: int, glu: bool, positions: int
) -> ModelShape:
    """Megatron-LM's GPT: learned positions, LayerNorm and biases, output matrix tied to the embedding."""
    matrices, C = 3 if glu else 2, width // heads
    biases = (
        *norms(width, 4),  # gain and bias of two norms, and the two below
        *(Weight((heads * C,), ("heads",)), *(Weight((kv_heads * C,), ("kv_heads",)),) * 2),
        *(Weight((ff,), ("ff",)),) * (matrices - 1),
        *norms(width, 2),
    )
    weights = (*attention_weights(width, heads, kv_heads, C), *ff_weights(width, ff, matrices), *biases)
    layer = LayerShape(heads, kv_heads, C, ff, matrices, weights)
    table, position = Weight((vocab_size, width), ("vocab", "embed")), Weight((positions, width), ("position", "embed"))
    return ModelShape(
        "gpt", vocab_size, width, (layer,) * layers, (table, position), norms(width), tied=True, max_positions=positions
    )


def _mixtral(name: str, layers: int, width: int, heads: int, ff: int, vocab_size: int) -> ModelShape:
    """8 experts of which a token visits 2; 8 key/value heads of size 128."""
    weights = (
        *norms(width),
        *attention_weights(width, heads, 8, 128),
        *router_weights(width, 8),
        *ff_weights(width, ff, 3, experts=8),
    )
    layer = LayerShape(heads, 8, 128, ff, 3, weights, experts=8, experts_per_token=2)
    return ModelShape(name, vocab_size, width, (layer,) * layers, *_outside(width, vocab_size), tied=False)


def _deepseek_v3() -> ModelShape:
    """DeepSeek-V3 (arXiv 2412.19437, section 4.2): 61 layers, the first three dense; 256 experts of width 2048 of which
    a token visits 8, and one shared; without the module that predicts a second token."""
    width, heads = 7168, 128
    attention = latent_attention_weights(width, heads, query_rank=1536, kv_rank=512, rotary=64, plain=128, value=128)
    sizes = {"heads": heads, "kv_heads": heads, "head_size": 192, "value_head_size": 128, "ff_matrices": 3}
    dense = LayerShape(**sizes, ff=18_432, weights=(*norms(width), *attention, *ff_weights(width, 18_432, 3)))
    experts = LayerShape(
        **sizes,
        ff=2048,
        weights=(
            *norms(width),
            *attention,
            *router_weights(width, 256),
            *ff_weights(width, 2048, 3),
            *ff_weights(width, 2048, 3, experts=256),
        ),
        experts=256,
        experts_per_token=8,
        shared_ff=2048,
    )
    layers = (dense,) * 3 + (experts,) * 58
    return ModelShape("deepseek-v3", 129_280, width, layers, *_outside(width, 129_280), tied=False)


# Mistral AI's published configurations (Jiang et al. 2024, arXiv 2401.04088, for 8x7B)
SHAPES = {
    shape.name: shape
    for shape in (
        _mixtral("mixtral-8x7b", layers=32, width=4096, heads=32, ff=14_336, vocab_size=32_000),
        _mixtral("mixtral-8x22b", layers=56, width=6144, heads=48, ff=16_384, vocab_size=32_768),
        _deepseek_v3(),
    )
}
