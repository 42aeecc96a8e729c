"""Attention rollout and flow: rows that add up, plain products, and cuts counted by hand."""

from itertools import chain, combinations

import pytest
import torch

from hf_vaswani.analysis.flow import (
    decoder_flow,
    decoder_rollout,
    encoder_flow,
    encoder_rollout,
    model_flow,
    model_rollout,
)

S, T = 3, 2


def random_attention(*shape, seed=0, is_causal=False):
    scores = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    if is_causal:
        scores = scores.masked_fill(torch.ones(shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1)


def mixed(weights):
    """0.5 mean + 0.5 I, [H, L, L] -> lists."""
    return (0.5 * weights.mean(0) + 0.5 * torch.eye(weights.shape[-1], dtype=torch.float64)).tolist()


def product(a, b):
    return [[sum(a[i][k] * b[k][j] for k in range(len(b))) for j in range(len(b[0]))] for i in range(len(a))]


# ------------------------------------------------------------------ rollout
def test_encoder_rollout_is_the_product_of_layers_the_last_one_first():
    layers = [random_attention(2, S, S, seed=n) for n in range(3)]
    expected = product(mixed(layers[2]), product(mixed(layers[1]), mixed(layers[0])))
    torch.testing.assert_close(encoder_rollout(layers), torch.tensor(expected, dtype=torch.float64))


def test_decoder_rollout_is_that_of_plain_loops():
    encoder = encoder_rollout([random_attention(2, S, S, seed=7)])
    own = [random_attention(2, T, T, seed=n, is_causal=True) for n in range(2)]
    cross = [random_attention(2, T, S, seed=n + 10) for n in range(2)]
    rows = [[float(i == j) for j in range(T + S)] for i in range(T)]
    for mine, theirs in zip(own, cross, strict=True):
        weights = mine.mean(0).tolist()
        rows = [
            [0.5 * rows[i][j] + 0.5 * sum(weights[i][k] * rows[k][j] for k in range(T)) for j in range(T + S)]
            for i in range(T)
        ]
        source = product(theirs.mean(0).tolist(), encoder.tolist())
        rows = [
            [0.5 * rows[i][j] + (0.5 * source[i][j - T] if j >= T else 0.0) for j in range(T + S)] for i in range(T)
        ]
    found = decoder_rollout(own, cross, encoder)
    torch.testing.assert_close(found, torch.tensor(rows, dtype=torch.float64))
    torch.testing.assert_close(found.sum(-1), torch.ones(T, dtype=torch.float64))


def test_one_step_by_hand():
    # Half stays, half goes to the other token.
    swap = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    assert encoder_rollout([swap]).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    first = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    assert encoder_rollout([first, first]).tolist() == [[1.0, 0.0], [0.75, 0.25]]


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_a_models_rollout_has_rows_that_add_up_to_one_and_none_on_padding(make_model, batch, norm_position):
    model = make_model(norm_position=norm_position).train()
    ids = torch.tensor([[2, 9, 12, 5, 30], [2, 4, 4, 33, 8], [2, 17, 6, 3, 3]])
    found = model_rollout(model, batch["input_ids"], ids, batch["attention_mask"])
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert (found.encoder.shape, found.decoder.shape) == ((3, 7, 7), (3, 5, 12))
    for one in (found.encoder, found.decoder):
        torch.testing.assert_close(one.sum(-1), torch.ones(one.shape[:-1]))
    assert found.encoder[1, :4, 4:].eq(0).all()
    assert found.decoder[1, :, 5 + 4 :].eq(0).all()
    assert found.decoder[:, :, :5].triu(1).eq(0).all()
    alone = model_rollout(model, batch["input_ids"][1:2, :4], ids[1:2])
    torch.testing.assert_close(alone.encoder[0], found.encoder[1, :4, :4])
    torch.testing.assert_close(alone.decoder[0], found.decoder[1, :, : 5 + 4])


# ------------------------------------------------------------------ flow
def smallest_cut(edges, start, end):
    """The least capacity over all ways to part the nodes: by the max-flow min-cut theorem, the greatest flow."""
    inner = sorted({node for edge in edges for node in edge} - {start, end}, key=str)
    best = float("inf")
    for chosen in chain.from_iterable(combinations(inner, size) for size in range(len(inner) + 1)):
        near = {start, *chosen}
        best = min(best, sum(width for (a, b), width in edges.items() if a in near and b not in near))
    return best


def connect(edges, above, below, weights):
    for i, row in enumerate(weights):
        for j, width in enumerate(row):
            key = ((*above, i), (*below, j))
            edges[key] = edges.get(key, 0.0) + width


def encoder_edges(layers):
    edges = {}
    for n, weights in enumerate(layers):
        connect(edges, ("e", n + 1), ("e", n), mixed(weights))
    return edges


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_encoder_flow_is_the_smallest_cut(depth):
    layers = [random_attention(2, S, S, seed=n) for n in range(depth)]
    found = encoder_flow(layers)
    for i in range(S):
        for j in range(S):
            expected = smallest_cut(encoder_edges(layers), ("e", depth, i), ("e", 0, j))
            assert found[i, j].item() == pytest.approx(expected, abs=1e-7)


def test_flow_of_one_layer_is_its_mixed_attention():
    weights = random_attention(2, 4, 4)
    torch.testing.assert_close(encoder_flow([weights]), torch.tensor(mixed(weights), dtype=torch.float64))


def test_decoder_flow_is_the_smallest_cut():
    encoder = [random_attention(2, S, S, seed=5)]
    own = [random_attention(2, T, T, seed=n, is_causal=True) for n in range(2)]
    cross = [random_attention(2, T, S, seed=n + 10) for n in range(2)]
    edges = encoder_edges(encoder)
    half = [[0.5 * (i == j) for j in range(T)] for i in range(T)]
    for n, (mine, theirs) in enumerate(zip(own, cross, strict=True)):
        connect(edges, ("d", 2 * n + 1), ("d", 2 * n), mixed(mine))
        connect(edges, ("d", 2 * n + 2), ("d", 2 * n + 1), half)
        connect(edges, ("d", 2 * n + 2), ("e", 1), (0.5 * theirs.mean(0)).tolist())
    found = decoder_flow(own, cross, encoder)
    ends = [("d", 0, j) for j in range(T)] + [("e", 0, j) for j in range(S)]
    for i in range(T):
        for j, end in enumerate(ends):
            expected = smallest_cut({edge: width for edge, width in edges.items() if width}, ("d", 4, i), end)
            assert found[i, j].item() == pytest.approx(expected, abs=1e-7)


def test_a_models_flow_takes_one_sentence(make_model):
    model = make_model()
    source, target = torch.tensor([[5, 9, 7, 1]]), torch.tensor([[2, 6, 3]])
    found, rolled = model_flow(model, source, target), model_rollout(model, source, target)
    assert (found.encoder.shape, found.decoder.shape) == ((1, 4, 4), (1, 3, 7))
    assert found.decoder[0, :, :3].triu(1).eq(0).all()
    # All that rolls out along paths could have flowed.
    assert (found.encoder >= rolled.encoder - 1e-6).all()
    assert (found.decoder >= rolled.decoder - 1e-6).all()
    assert found.encoder.max() <= 1 + 1e-6
    with pytest.raises(ValueError, match="one sentence at a time, got 2"):
        model_flow(model, source.repeat(2, 1), target.repeat(2, 1))


def test_without_scipy_it_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(ImportError, match="pip install scipy"):
        encoder_flow([random_attention(2, S, S)])
