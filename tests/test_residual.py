"""The residual stream taken apart, in float64: every sum against what the model itself computed."""

import pytest
import torch

from hf_vaswani.analysis.head_masks import Head, masked_heads
from hf_vaswani.analysis.residual import residual_parts

SHAPES = {
    "paper": {},
    "pre-norm": {"norm_position": "pre"},
    "pre-norm without a last norm": {"norm_position": "pre", "final_norm": False},
    "descendant": {
        "final_norm": True, "attention_bias": True, "zero_start_embedding": True, "position_encoding": "learned",
        "scale_embedding": False, "tie_word_embeddings": False, "source_vocab_size": 41,
    },
}  # fmt: skip
DECODER_IDS = torch.tensor([[2, 9, 12, 5, 30], [2, 4, 4, 33, 8], [2, 17, 6, 3, 3]])


@pytest.fixture(params=SHAPES)
def model(make_model, request):
    model = make_model(**SHAPES[request.param]).double()
    with torch.no_grad():
        for one in model.parameters():
            one.normal_(std=0.5)  # biases and gains unlike each other
    return model


def norms_of(stack):
    """Names of a stack's norms, as the points call them, and the norms, in the order of use."""
    side = "encoder" if len(stack.layers) == 2 else "decoder"
    sublayers = ["self_attn", "feed_forward"] if side == "encoder" else ["self_attn", "encoder_attn", "feed_forward"]
    found = [
        (f"{side}.{n}.{name}", getattr(layer, f"{name}_residual").layer_norm)
        for n, layer in enumerate(stack.layers)
        for name in sublayers
    ]
    return found + ([(f"{side}.final_norm", stack.layer_norm)] if stack.layer_norm is not None else [])


def test_writes_and_parts_add_up_to_the_stream_before_each_norm(model, batch):
    seen = {}
    stacks = {"encoder": model.model.encoder, "decoder": model.model.decoder}
    handles = [
        norm.register_forward_pre_hook(lambda module, inputs, place=place: seen.update({place: inputs[0]}))
        for stack in stacks.values()
        for place, norm in norms_of(stack)
    ]
    with torch.no_grad():
        out = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=DECODER_IDS,
            output_hidden_states=True,
        )  # fmt: skip
    for handle in handles:
        handle.remove()
    seen["encoder.end"], seen["decoder.end"] = out.encoder_last_hidden_state, out.decoder_hidden_states[-1]
    model.train()
    found = residual_parts(model, batch["input_ids"], DECODER_IDS, batch["attention_mask"])
    assert model.training
    for side, points in (("encoder", found.encoder), ("decoder", found.decoder)):
        assert [one.place for one in points] == [place for place, _ in norms_of(stacks[side])] + [f"{side}.end"]
        for one in points:
            torch.testing.assert_close(one.stream, seen[one.place], rtol=0, atol=1e-11)
            for names, parts in ((one.write_names, one.writes), (one.part_names, one.parts)):
                assert len(names) == len(set(names)) == len(parts)
                torch.testing.assert_close(parts.sum(0), seen[one.place], rtol=0, atol=1e-10)
    assert found.encoder[0].stream.shape == (3, 7, 16)
    assert found.decoder[0].stream.shape == (3, 5, 16)
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, torch.nn.LayerNorm))


def test_the_logits_of_the_end_are_the_models(model, batch):
    found = residual_parts(model, batch["input_ids"], DECODER_IDS, batch["attention_mask"])
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=DECODER_IDS
    ).logits
    by_part = found.decoder[-1].parts @ model.lm_head.weight.T  # [P, B, T, V]
    torch.testing.assert_close(by_part.sum(0), logits, rtol=0, atol=1e-9)


def test_a_heads_write_is_what_masking_it_takes_away(model, batch):
    arguments = (batch["input_ids"], DECODER_IDS, batch["attention_mask"])
    whole = residual_parts(model, *arguments)
    # The first place in each stack where nothing before it changes with the head.
    for head, side in ((Head("encoder", 0, 1), "encoder"), (Head("decoder", 0, 0), "decoder")):
        with masked_heads(model, [head]):
            masked = residual_parts(model, *arguments)
        index = next(n for n, one in enumerate(getattr(whole, side)) if str(head) in one.write_names)
        point, other = getattr(whole, side)[index], getattr(masked, side)[index]
        write = point.writes[point.write_names.index(str(head))]
        torch.testing.assert_close(point.stream - other.stream, write, rtol=0, atol=1e-11)
        assert write.abs().max() > 0.1
        assert torch.equal(other.writes[other.write_names.index(str(head))], torch.zeros_like(write))


def test_every_sublayer_is_named_and_the_start_is_embedding_and_position(make_model, batch):
    model = make_model(attention_bias=True).double()
    found = residual_parts(model, batch["input_ids"], DECODER_IDS, batch["attention_mask"])
    first, second, third = found.decoder[:3]
    assert first.write_names == ["embedding", "position", "decoder.0.0", "decoder.0.1", "decoder.0.bias"]
    assert second.write_names == ["stream", "cross.0.0", "cross.0.1", "cross.0.bias"]
    assert third.write_names == ["stream", "decoder.0.feed_forward", "decoder.0.feed_forward.bias"]
    assert third.part_names[5:10] == [
        "decoder.0.self_attn.norm_bias", "cross.0.0", "cross.0.1", "cross.0.bias", "decoder.0.encoder_attn.norm_bias",
    ]  # fmt: skip
    torch.testing.assert_close(first.writes[0], model.model.shared(DECODER_IDS) * 4.0)
    torch.testing.assert_close(first.writes[1][0], model.model.decoder.embed_positions.table[:5].double())


def test_a_part_goes_through_a_norm_by_hand(make_model):
    model = make_model().double()
    with torch.no_grad():
        model.model.encoder.layers[0].self_attn_residual.layer_norm.weight.normal_()
    ids = torch.tensor([[5, 9, 1]])
    first, second = residual_parts(model, ids, DECODER_IDS[:1, :2]).encoder[:2]
    for place in range(3):
        stream = first.stream[0, place].tolist()
        mean = sum(stream) / 16
        sigma = (sum((x - mean) ** 2 for x in stream) / 16 + 1e-6) ** 0.5
        part = first.parts[2, 0, place].tolist()  # head 0
        gains = model.model.encoder.layers[0].self_attn_residual.layer_norm.weight.tolist()
        expected = [gain * (x - sum(part) / 16) / sigma for gain, x in zip(gains, part, strict=True)]
        assert second.parts[2, 0, place].tolist() == pytest.approx(expected, abs=1e-12)


def test_in_float32_the_sums_hold_to_1e_5(make_model, batch):
    found = residual_parts(make_model(), batch["input_ids"], DECODER_IDS, batch["attention_mask"])
    for one in found.encoder + found.decoder:
        torch.testing.assert_close(one.writes.sum(0), one.stream, rtol=0, atol=1e-5)
        torch.testing.assert_close(one.parts.sum(0), one.stream, rtol=0, atol=1e-5)


def test_one_table_for_both_sides_and_pruned_heads_are_no_obstacle(make_model, batch):
    from hf_vaswani.analysis.pruning import prune_heads

    model = make_model()
    model.set_input_embeddings(model.model.shared)  # one module in three places
    model = prune_heads(model, [Head("cross", 1, 0)])
    found = residual_parts(model, batch["input_ids"], DECODER_IDS, batch["attention_mask"])
    assert [name for name in found.decoder[-1].part_names if name.startswith("cross.1.")] == ["cross.1.0"]
    for one in found.encoder + found.decoder:
        torch.testing.assert_close(one.parts.sum(0), one.stream, rtol=0, atol=1e-5)
