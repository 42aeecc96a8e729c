"""The paper's search: beam 4, the length penalty of Wu et al. (2016), at most source length + 50 new tokens.

The loop is transformers' own; here are the rules that it does not have. They live in `generation_config.json`
(`length_penalty_type`, `max_length_offset`, `forced_prefix_ids`) and can be given to `generate()` call by call.

Choice: a hypothesis that reaches its limit without an end token competes as it stands, as in transformers; others
drop it. Only candidates among the best `num_beams` of a step may end, as in transformers and fairseq.
"""

import copy
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import (
    EosTokenCriteria,
    GenerateBeamEncoderDecoderOutput,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .decoding_vaswani import FoldedDecoder
from .search_vaswani import IMPOSSIBLE, Rules, beam_search, greedy_search

# Fields of ours in the generation configuration, and what a configuration without them means.
_OWN_FIELDS = {
    "length_penalty_type": "power", "max_length_offset": None, "forced_prefix_ids": None,
    "output_sequence_scores": False,
}  # fmt: skip
_PENALTY_TYPES = ("gnmt", "power")
# What Seq2SeqTrainer writes on a model's generation configuration although nobody asked for it.
_LIBRARY_MAX_LENGTH = 20


def paper_generation_config(config: Any) -> GenerationConfig:
    """The settings of section 6.1 for a model.

    Args:
        config (`VaswaniConfig`): gives the special tokens.

    Returns:
        `GenerationConfig`: beam 4, alpha 0.6 in the GNMT form, source length + 50, ending when nothing can win.

    Source: Vaswani et al. 2017, section 6.1.
    """
    return GenerationConfig(
        num_beams=4,
        length_penalty=0.6,
        length_penalty_type="gnmt",
        early_stopping="never",
        max_length_offset=50,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )


def length_penalty_factor(length: int | torch.Tensor, alpha: float, kind: str = "gnmt") -> Any:
    """lp(Y) = (5 + |Y|)^alpha / (5 + 1)^alpha; a hypothesis scores log P(Y) / lp(Y).

    Args:
        length (`int` or `torch.Tensor`): generated tokens, the end token included, the start token not.
        alpha (`float`): 0 is no penalty; the paper's is 0.6.
        kind (`str`): "gnmt" is the formula above; "power" is |Y|^alpha, transformers' own.

    Source: Wu et al. 2016, eq. (14), used in Vaswani et al. 2017, section 6.1.
    """
    return ((5.0 + length) / 6.0) ** alpha if kind == "gnmt" else length**alpha


class LengthPenalty(float):
    """The exponent that transformers' loop hands around, with the rules of one search attached to it.

    The loop uses it only as `length ** penalty` and in comparisons, so a number with its own power is enough.

    Args:
        alpha (`float`): the exponent. kind (`str`): "gnmt" or "power".
        limits (`torch.Tensor`, *optional*): [B], the most new tokens of each sentence.
        wanted (`int`): hypotheses asked for, per sentence.
    """

    kind: str
    limits: torch.Tensor | None
    wanted: int

    def __new__(
        cls, alpha: float, kind: str = "gnmt", limits: torch.Tensor | None = None, wanted: int = 1
    ) -> "LengthPenalty":
        made = super().__new__(cls, alpha)
        made.kind, made.limits, made.wanted = kind, limits, wanted
        return made

    def __rpow__(self, length: Any, mod: Any = None) -> Any:
        return length_penalty_factor(length, float(self), self.kind)


class SentenceLimit(StoppingCriteria):
    """Ends each sentence at its own number of new tokens, whatever else is in the batch.

    Args:
        limits (`torch.Tensor`): [B], new tokens.
    """

    def __init__(self, limits: torch.Tensor):
        self.limits = limits
        self.prompt_length: int | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1] - 1  # the first call comes after the first new token
        new_tokens = input_ids.shape[1] - self.prompt_length
        per_row = self.limits.repeat_interleave(input_ids.shape[0] // len(self.limits))
        return (new_tokens >= per_row).to(input_ids.device)


# What our own loop knows how to end by.
_KNOWN_CRITERIA = (SentenceLimit, MaxLengthCriteria, EosTokenCriteria)


def _check_scores(best: torch.Tensor, step: int) -> None:
    """Stop where the scores that the next token is chosen by are not numbers; step counts from 1."""
    if torch.isnan(best).any():
        raise FloatingPointError(
            f"The model's scores are not numbers at step {step} of decoding, so no translation can be chosen. A weight "
            "that is not finite is the usual cause; in half precision an overflow is: try float32."
        )


class FiniteScores(LogitsProcessor):
    """Ends greedy search and sampling with a sentence where a score is not a number; beam search looks by itself.

    Args:
        prompt_length (`int`): columns that the decoder starts with.
    """

    def __init__(self, prompt_length: int):
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # The maximum of a row is not a number where any of its scores is none.
        _check_scores(scores.amax(dim=-1), input_ids.shape[1] - self.prompt_length + 1)
        return scores


class ForcedPrefix(LogitsProcessor):
    """Lets only the given tokens come first, one after the other.

    Args:
        prefix (`list[int]`): token ids. prompt_length (`int`): columns before the first new token.
    """

    def __init__(self, prefix: list[int], prompt_length: int):
        self.prefix, self.prompt_length = prefix, prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        step = input_ids.shape[1] - self.prompt_length
        if step >= len(self.prefix):
            return scores
        forced = torch.full_like(scores, -float("inf"))
        forced[:, self.prefix[step]] = 0.0
        return forced


class VaswaniGenerationMixin(GenerationMixin):
    """`generate()` of the paper; every argument of the library's `generate()` still works."""

    config: Any
    device: Any
    lm_head: Any
    _plain_classes: tuple[type, ...] = ()

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Translate token ids; without further arguments, by the paper's search (section 6.1).

        Args:
            inputs or input_ids (`torch.LongTensor`): [B, S], with `attention_mask` [B, S] where there is padding.
            length_penalty_type (`str`): "gnmt" (the paper) or "power" (transformers).
            max_length_offset (`int` or None): the most new tokens a sentence may have beyond its source's length,
                both with their end token. It yields to a `max_length` or `max_new_tokens` that is given.
            forced_prefix_ids (`list[int]`): tokens that every translation must begin with.
            output_sequence_scores (`bool`): of a beam search, give an object with `sequences`, `sequences_scores` and
                `beam_indices`, without the scores of every step that `output_scores` keeps.

        Returns:
            `torch.LongTensor` [B * num_return_sequences, 1 + new tokens], padded on the right after the end token; or
            the library's output object with `return_dict_in_generate=True`.

        Raises:
            ValueError: for padding without a mask, an unknown penalty type, or a length past a learned table.
        """
        offset = self._own_field("max_length_offset", generation_config, kwargs)
        if offset is not None and not self._length_is_given(generation_config, kwargs):
            limits = self._source_lengths(inputs, kwargs) + offset
            if self.config.position_encoding == "learned":
                limits = limits.clamp(max=self.config.max_position_embeddings)
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), SentenceLimit(limits)])
            if generation_config is None:
                kwargs["max_new_tokens"] = int(limits.max())
            else:  # the library deprecates a configuration together with single settings
                generation_config = copy.deepcopy(generation_config)
                generation_config.max_new_tokens = int(limits.max())
        return super().generate(inputs, generation_config, logits_processor, stopping_criteria, *args, **kwargs)

    def _own_field(self, name: str, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> Any:
        """A field of ours, from the call, else from the configuration of the call, else from the model's."""
        if name in kwargs:
            return kwargs[name]
        for config in (generation_config, self.generation_config):
            if config is not None and hasattr(config, name):
                return getattr(config, name)
        return _OWN_FIELDS[name]

    def _length_is_given(self, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> bool:
        """Whether anybody set a length limit of their own."""
        given = [kwargs.get("max_length"), kwargs.get("max_new_tokens")]
        if generation_config is not None:
            given += [generation_config.max_length, generation_config.max_new_tokens]
        given.append(self.generation_config.max_new_tokens)
        if self.generation_config.max_length != _LIBRARY_MAX_LENGTH:
            given.append(self.generation_config.max_length)
        return any(limit is not None for limit in given)

    def _source_lengths(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor:
        """Tokens of each source sentence, its end token included: [B]."""
        encoder_outputs = kwargs.get("encoder_outputs")
        candidates = [inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        candidates.append(encoder_outputs[0] if encoder_outputs is not None else None)
        source = next((one for one in candidates if one is not None), None)
        if source is None:
            raise ValueError("`generate` needs a source: pass `input_ids`, `inputs_embeds` or `encoder_outputs`.")
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            return mask.long().sum(-1)
        return torch.full((source.shape[0],), source.shape[1], dtype=torch.long, device=source.device)

    # ------------------------------------------------------------------ hooks of the library's generate()
    def _prepare_generation_config(self, generation_config: GenerationConfig | None, **kwargs: Any) -> Any:
        own = {name: self._own_field(name, generation_config, kwargs) for name in _OWN_FIELDS}
        kind = own["length_penalty_type"]
        if kind not in _PENALTY_TYPES:
            raise ValueError(f"`length_penalty_type` must be one of {_PENALTY_TYPES}, got {kind!r}.")
        rest = {key: value for key, value in kwargs.items() if key not in _OWN_FIELDS}
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **rest)  # type: ignore[misc]
        for name, value in own.items():
            setattr(prepared, name, value)
        return prepared, model_kwargs

    def _validate_generated_length(self, generation_config: GenerationConfig, *args: Any) -> None:
        rows = self.config.max_position_embeddings
        longest = generation_config.max_length - 1  # the last token is predicted, never read
        if self.config.position_encoding == "learned" and longest > rows:
            raise ValueError(
                f"A translation of {longest} tokens was asked for, but the learned position table has {rows} rows "
                "(`max_position_embeddings`). Ask for fewer, or use a model with sinusoidal positions."
            )
        super()._validate_generated_length(generation_config, *args)  # type: ignore[misc]

    def _get_logits_processor(
        self, generation_config: Any, input_ids_seq_length: int | None = None, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        processors = super()._get_logits_processor(  # type: ignore[misc]
            generation_config, input_ids_seq_length, *args, **kwargs
        )
        prefix = generation_config.forced_prefix_ids
        if prefix:
            outside = [one for one in prefix if not 0 <= one < self.config.vocab_size]
            if outside:
                raise ValueError(f"`forced_prefix_ids` has ids outside the vocabulary: {outside}.")
            processors.append(ForcedPrefix(list(prefix), input_ids_seq_length or 1))
        if generation_config.num_beams == 1:
            processors.insert(0, FiniteScores(input_ids_seq_length or 1))
        return processors

    def _folded_search(self, num_beams: int, config: Any, processors: Any, criteria: Any, kwargs: Any) -> Any:
        """The decoder and the rules of our own loop, or None where a request needs the library's.

        Ours reads one token of every hypothesis a step, so it does without a cache of the library's kind, and gives
        out neither scores of whole steps nor attentions or states.
        """
        wants = (
            "output_scores",
            "output_logits",
            "output_attentions",
            "output_hidden_states",
            "return_dict_in_generate",
        )
        given = {"encoder_outputs", "attention_mask", "use_cache", "logits_to_keep", "cache", "synced_gpus"}
        cache, ends = kwargs.get("cache"), config._eos_token_tensor
        if (
            any(getattr(config, name) for name in wants)
            or {name for name, value in kwargs.items() if value is not None} - given
            or kwargs.get("synced_gpus")
            or not kwargs.get("use_cache")
            or config.do_sample
            or config.cache_implementation is not None
            or (cache is not None and (type(cache) is not EncoderDecoderCache or cache.get_seq_length() > 0))
            or ends is None
            or config._pad_token_tensor is None
            or any(type(one) not in _KNOWN_CRITERIA for one in criteria)
            or any(
                set(one.eos_token_id.tolist()) != set(ends.tolist())
                for one in criteria
                if type(one) is EosTokenCriteria
            )
            or type(self) not in self._plain_classes
            or not FoldedDecoder.suits(self, self._plain_classes)
        ):
            return None
        rules = Rules(
            end_ids=ends,
            pad_id=int(config._pad_token_tensor),
            most=min(one.max_length for one in criteria if type(one) is MaxLengthCriteria) - 1,
            check=_check_scores,
            limits=next((one.limits.to(ends.device) for one in criteria if isinstance(one, SentenceLimit)), None),
        )
        others = LogitsProcessorList()
        for one in processors:
            if type(one) is MinNewTokensLengthLogitsProcessor:
                rules.least = max(rules.least, one.min_new_tokens)
            elif type(one) is MinLengthLogitsProcessor:
                rules.least = max(rules.least, one.min_length - 1)
            elif type(one) is ForcedPrefix:
                rules.prefix = one.prefix
            elif type(one) is not FiniteScores:
                others.append(one)
        if others:  # in their own order, with those that we know
            rules.processors, rules.least, rules.prefix = processors, 0, []
        states = kwargs["encoder_outputs"].last_hidden_state[::num_beams]
        mask = kwargs.get("attention_mask")
        is_real = None if mask is None else mask[::num_beams].bool()
        if is_real is not None:
            is_real = is_real | ~is_real.any(dim=-1, keepdim=True)  # a row of padding alone reads its padding
        if min(self.config.vocab_size, len(self.lm_head.weight)) < 2 * max(2, 1 + len(ends)) * num_beams:
            return None
        return FoldedDecoder(self, states, is_real, num_beams), rules

    def _beam_search(  # type: ignore[override]
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **kwargs: Any,
    ) -> Any:
        # `generation_config` is generate()'s own copy, so nothing of this is left behind on the model.
        limits = next((one.limits for one in stopping_criteria if isinstance(one, SentenceLimit)), None)
        kind, num_beams = generation_config.length_penalty_type, generation_config.num_beams
        wanted = generation_config.num_return_sequences
        penalty = LengthPenalty(generation_config.length_penalty, kind, limits, wanted)
        generation_config.length_penalty = penalty
        folded = None
        if input_ids.shape[1] == 1 and input_ids.device == self.device:
            folded = self._folded_search(num_beams, generation_config, logits_processor, stopping_criteria, kwargs)
        if folded is not None:
            decoder, rules = folded
            early_stopping = generation_config.early_stopping

            def can_improve(running: torch.Tensor, finished: Any, length: int, sentences: torch.Tensor) -> torch.Tensor:
                its = LengthPenalty(penalty, kind, None if rules.limits is None else rules.limits[sentences], wanted)
                return self._check_early_stop_heuristic(
                    running.new_ones(len(running), 1, dtype=torch.bool), running, finished.scores, finished.is_there,
                    length + 1, generation_config.max_length, 1, early_stopping, its,
                )  # fmt: skip

            prompt = input_ids.view(-1, num_beams)
            found = beam_search(decoder, prompt, rules, penalty, early_stopping, wanted, can_improve)
            if not generation_config.output_sequence_scores:
                return found.sequences
            sequences: Any = found.sequences
            beams: Any = found.beam_indices
            return GenerateBeamEncoderDecoderOutput(
                sequences=sequences, sequences_scores=found.scores, beam_indices=beams
            )
        # The beam indices tell where each hypothesis ends; without them an end token cannot be told from filling.
        wants_dict = generation_config.return_dict_in_generate
        generation_config.return_dict_in_generate = True
        wants_steps = generation_config.output_scores
        generation_config.output_scores = wants_steps or generation_config.output_sequence_scores
        result: Any = super()._beam_search(  # type: ignore[misc]
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **kwargs,
        )
        pad = generation_config._pad_token_tensor
        if pad is not None:
            # The library fills with the end token where the pad id is 0.
            new_tokens = result.sequences[:, input_ids.shape[1] :]
            new_tokens.masked_fill_(result.beam_indices[:, : new_tokens.shape[1]] < 0, int(pad))
        if not wants_steps:
            result.scores = None
        return result if wants_dict or generation_config.output_sequence_scores else result.sequences

    def _sample(  # type: ignore[override]
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        is_plain = streamer is None and not synced_gpus and input_ids.shape[1] == 1 and input_ids.device == self.device
        if is_plain:
            folded = self._folded_search(1, generation_config, logits_processor, stopping_criteria, kwargs)
            if folded is not None:
                return greedy_search(folded[0], input_ids, folded[1])
        return super()._sample(  # type: ignore[misc]
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **kwargs,
        )

    def _get_top_k_continuations(  # type: ignore[override]
        self, accumulated_log_probs: torch.Tensor, **kwargs: Any
    ) -> Any:
        continued = super()._get_top_k_continuations(accumulated_log_probs, **kwargs)
        _check_scores(continued[0], kwargs["cur_len"] - kwargs["decoder_prompt_len"] + 1)
        return continued

    @staticmethod
    def _check_early_stop_heuristic(
        is_early_stop_heuristic_unsatisfied: torch.Tensor,
        running_beam_scores: torch.Tensor,
        beam_scores: torch.Tensor,
        is_sent_finished: torch.Tensor,
        cur_len: int,
        max_length: int,
        decoder_prompt_len: int,
        early_stopping: bool | str,
        length_penalty: float,
    ) -> torch.Tensor:
        """Per sentence: can an open hypothesis still become one of those that were asked for?

        log P only falls as a hypothesis grows, so the best that an open one can reach is its log P now over the
        largest factor ahead of it: the one at its sentence's own limit for a positive alpha, else the next one.
        """
        if early_stopping != "never" or not isinstance(length_penalty, LengthPenalty):
            return GenerationMixin._check_early_stop_heuristic(
                is_early_stop_heuristic_unsatisfied,
                running_beam_scores,
                beam_scores,
                is_sent_finished,
                cur_len,
                max_length,
                decoder_prompt_len,
                early_stopping,
                length_penalty,
            )
        next_length: Any = cur_len - decoder_prompt_len + 1
        if length_penalty > 0.0:
            longest: Any = max_length - decoder_prompt_len
            if length_penalty.limits is not None:
                longest = length_penalty.limits.clamp(max=longest)[:, None].to(running_beam_scores.device)  # [B, 1]
        else:
            longest = next_length
        factor = length_penalty_factor(longest, float(length_penalty), length_penalty.kind)
        reachable = running_beam_scores[:, :1] / factor  # [B, 1]; finished hypotheses are sorted, best first
        weakest = torch.where(
            is_sent_finished[:, : length_penalty.wanted].all(dim=-1, keepdim=True),
            beam_scores[:, length_penalty.wanted - 1 : length_penalty.wanted],
            2 * IMPOSSIBLE,
        )
        is_alive = running_beam_scores[:, :1] > IMPOSSIBLE / 2
        return is_early_stop_heuristic_unsatisfied & is_alive & (reachable > weakest)
