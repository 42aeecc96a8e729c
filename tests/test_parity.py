"""The same weights in other implementations give the same logits, padded batches included."""

import math

import pytest
import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

from hf_vaswani.modeling_vaswani import sinusoid_table


def randomise(model):
    """Give norms and biases values of their own, which their initial ones and zeros would hide."""
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=0.5 if name.endswith("weight") else 0.0, std=0.3)


def copy_sublayer(state, ours, theirs, names):
    for part, other in names.items():
        for kind in ("weight", "bias"):
            if f"{ours}.{part}.{kind}" in state:
                yield f"{theirs}.{other}.{kind}", state[f"{ours}.{part}.{kind}"]


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_torch_nn_transformer_gives_equal_logits(make_model, batch, norm_position):
    model = make_model(d_k=8, d_v=8, attention_bias=True, norm_position=norm_position)
    randomise(model)
    config, state = model.config, model.state_dict()
    pre = norm_position == "pre"
    peer = nn.Transformer(
        16, 2, 2, 3, 24, dropout=0.0, activation="relu", batch_first=True, norm_first=pre, layer_norm_eps=1e-6
    ).eval()
    if not pre:
        peer.encoder.norm = peer.decoder.norm = None  # torch's extra norm is not the paper's
    theirs = {}
    for side, layers, blocks in (
        ("encoder", config.encoder_layers, {"self_attn": "self_attn"}),
        ("decoder", config.decoder_layers, {"self_attn": "self_attn", "encoder_attn": "multihead_attn"}),
    ):
        for n in range(layers):
            ours, other = f"model.{side}.layers.{n}", f"{side}.layers.{n}"
            for block, name in blocks.items():
                for kind in ("weight", "bias"):
                    qkv = [state[f"{ours}.{block}.{part}_proj.{kind}"] for part in ("q", "k", "v")]
                    theirs[f"{other}.{name}.in_proj_{kind}"] = torch.cat(qkv)
                    theirs[f"{other}.{name}.out_proj.{kind}"] = state[f"{ours}.{block}.out_proj.{kind}"]
            norms = [*(f"{block}_residual" for block in blocks), "feed_forward_residual"]
            for place, norm in enumerate(norms, start=1):
                for kind in ("weight", "bias"):
                    theirs[f"{other}.norm{place}.{kind}"] = state[f"{ours}.{norm}.layer_norm.{kind}"]
            theirs.update(copy_sublayer(state, f"{ours}.feed_forward", other, {"fc1": "linear1", "fc2": "linear2"}))
        if pre:
            theirs.update(copy_sublayer(state, f"model.{side}", side, {"layer_norm": "norm"}))
    peer.load_state_dict(theirs)

    def embed(ids):
        return state["model.shared.weight"][ids] * math.sqrt(16) + sinusoid_table(ids.shape[1], 16)

    target = torch.tensor([[2, 4, 6, 8, 9], [2, 9, 11, 13, 3], [2, 5, 5, 7, 7]])
    hidden = batch["attention_mask"] == 0
    with torch.no_grad():
        states = peer(
            embed(batch["input_ids"]), embed(target), src_key_padding_mask=hidden, memory_key_padding_mask=hidden,
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(5), tgt_is_causal=True,
        )  # fmt: skip
        expected = states @ state["model.shared.weight"].T
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=target
        ).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_marian_gives_equal_logits_and_translations(make_model, batch):
    peer = MarianMTModel(
        MarianConfig(
            vocab_size=37, d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, activation_function="relu",
            max_position_embeddings=64, scale_embedding=True, pad_token_id=0, eos_token_id=1, bos_token_id=2,
            decoder_start_token_id=2, forced_eos_token_id=None,
        )
    ).eval()  # fmt: skip
    torch.manual_seed(12)
    nn.init.normal_(peer.final_logits_bias)
    randomise(peer)
    model = make_model(
        d_k=8, d_v=8, attention_bias=True, output_bias=True, sinusoid_layout="halves", layer_norm_eps=1e-5
    )
    theirs, state = peer.state_dict(), {}
    for name in model.state_dict():
        other = name.replace("feed_forward.fc", "fc").replace("feed_forward_residual.layer_norm", "final_layer_norm")
        other = other.replace("_residual.layer_norm", "_layer_norm")
        state[name] = peer.final_logits_bias[0] if name == "lm_head.bias" else theirs[other]
    model.load_state_dict(state)
    source = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    target = torch.tensor([[2, 4, 6, 8, 9], [2, 9, 11, 13, 3], [2, 5, 5, 7, 7]])
    with torch.no_grad():
        logits = model(**source, decoder_input_ids=target).logits
        expected = peer(**source, decoder_input_ids=target).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    options = {
        "num_beams": 4,
        "max_new_tokens": 12,
        "early_stopping": "never",
        "length_penalty": 0.6,
        "do_sample": False,
    }
    ours = model.generate(**source, **options, length_penalty_type="power")
    for row, other in zip(ours.tolist(), peer.generate(**source, **options).tolist(), strict=True):
        end = row.index(1) + 1 if 1 in row else len(row)
        assert row[:end] == other[:end]
