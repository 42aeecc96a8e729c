r"""The task "translation" of `transformers.pipeline`: text in, text out, for ours and any other seq2seq model.

Text is plain text. Mark-up is not read: `<` is a letter like any other, and tags may come back changed. To translate a
page, take its text nodes out with an HTML parser, send them as a list, and put the results back: order and count are
kept. Nothing is reordered either, and no direction mark is added or lost: how right-to-left text is shown is the page's
affair, and reversing the target side is a training trick that has nothing to do with scripts.
"""

import difflib
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import GenerationConfig, Pipeline, pipelines
from transformers.utils import logging as library_logging

from .text_vaswani import CUTTERS, cut_text, needs_blank

logger = logging.getLogger(__name__)

# Options of the pipeline itself, for the constructor and for every call; all else is an argument of `generate`.
_DEFAULTS: dict[str, Any] = {
    "batch_tokens": None, "window": None, "passthrough": True, "split_sentences": False, "lines": "keep",
    "long_input": "split", "src_lang": None, "tgt_lang": None, "column": None, "prefix": None, "return_scores": False,
    "return_flags": False, "progress": None, "truncation": False,
}  # fmt: skip
_CHOICES = {"lines": ("keep", "join"), "long_input": ("split", "error")}
# Fields of our generation configuration, which the library does not know to be arguments of `generate`.
_OWN_GENERATION_FIELDS = {"length_penalty_type", "max_length_offset", "forced_prefix_ids"}
# Choice: what is read ahead for sorting; a longer window pads a little less, and answers later.
_BATCHES_PER_WINDOW = 8
# Choice: rows (a source has one for each beam), source tokens, and scores of one step (rows times vocabulary) that a
# batch may have at most. On processors larger batches gained nothing more; accelerators need them.
_ON_PROCESSOR = (512, 2048, 2**25)
_ON_ACCELERATOR = (2048, 16384, 2**27)
_SCORE_ELEMENTS = 2**28  # the library keeps the scores of every step: at most one GiB of float32 per batch
_NO_LIMIT = 10**9  # tokenizers without a limit of their own say 1e30

# One candidate for one piece of text: the text, its score, and what looks wrong about it.
_Candidate = tuple[str, float, tuple[str, ...]]


class VaswaniTranslationPipeline(Pipeline):
    """Translate text with an encoder-decoder model.

    Inputs are read in windows of a few batches, sorted by length inside a window, and given back in the order they
    came in, one result for each. Any number of inputs takes constant memory. `new_tokens` counts the tokens of all best
    candidates so far, end tokens included.

    Args:
        model (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): both needed.
        task (`str`): "translation", or "translation_xx_to_yy", which sets `src_lang` and `tgt_lang` where a model
            has languages, and picks the prefix in `config.task_specific_params` where it has those.
        batch_size (`int`): most pieces of text in a batch. With 1, a stream is answered line by line. Default: 512
            over the number of beams on a processor, 2,048 over it on an accelerator; less for a vocabulary over 64,000.
        batch_tokens (`int`): most source tokens in a batch, padding counted. A longer piece is a batch of its own.
            Default: 2,048 on a processor, 16,384 on an accelerator.
        window (`int`): batches (of `batch_size` inputs) that are read ahead and sorted by length. 1 keeps the order of
            the input. Default: 8; with a `batch_size` of 1 it is 1.
        passthrough (`bool`): give back unchanged what has no letter (numbers, signs, emoji), a lone web or mail
            address, and phonetic writing in brackets. Blank lines are given back empty with or without it.
        lines (`str`): "keep": each line of a text is translated by itself, and the line ends stay; "join": wrapped
            lines are one paragraph up to the next blank line, and the blank lines stay.
        split_sentences (`bool`): translate each sentence by itself, for models trained on single sentences.
        long_input (`str`): what to do with text longer than the model can take. "split": cut it at sentence ends,
            else at clause marks, else at blanks, and put the translations together; "error": refuse it.
            Nothing is ever cut off; `truncation`, which other tools pass, is accepted and cannot change that.
        src_lang, tgt_lang (`str`): language codes for models that have them (NLLB, mBART, M2M100).
        column (`str`): the column to read where an input is a dict, such as "text" or "translation.de". Default: the
            one named like `src_lang`, else "text", else "translation", else the only one with text in it.
        prefix (`str`): text put before every input, such as T5's "translate English to German: ".
        num_return_sequences (`int`): candidates per input, best first; each then has a "score". Candidates of equal
            text are given once, so there may be fewer.
        return_scores (`bool`): add "score", the log-probability (nats) divided by the length penalty's factor; of a
            text in several pieces, their mean; 0.0 for what the model never saw.
        return_flags (`bool`): add "flags", a list, empty or with "length_ratio" (more than 3 times the tokens of its
            source, end tokens counted), "repetition" (4 times the same in a row, unlike its source), and
            "reserved: ..." (codes such as `{name}` that were lost or doubled).
        progress (`bool`): a bar on standard error. Default: on a terminal, once two seconds have passed.
        num_workers: accepted for the library's sake; the tokenizer runs in threads of its own.
        kwargs: any argument of `generate`, here or in a call; plus the library's `device`, `dtype` and others.

    Raises:
        ValueError: without a tokenizer, or if the tokenizer has ids that the model has no rows for.
        TypeError: for a model that is no encoder-decoder, or an argument that nobody knows.
    """

    _load_tokenizer: Any = True
    _load_processor = _load_image_processor = _load_video_processor = _load_feature_extractor = False  # type: ignore
    _pipeline_calls_generate = True
    model: Any
    tokenizer: Any

    def __init__(self, model: Any, tokenizer: Any = None, task: str = "translation", **kwargs: Any) -> None:
        if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
            raise TypeError(f"Translation needs an encoder-decoder that can generate, not {type(model).__name__}.")
        if tokenizer is None or isinstance(tokenizer, str):
            raise ValueError("Translation needs a tokenizer: pass one, such as `AutoTokenizer.from_pretrained(...)`.")
        # With a vocabulary for each side, the source's ids look rows up in the encoder's own matrix.
        rows = getattr(model.config, "encoder_vocab_size", None) or model.get_input_embeddings().weight.shape[0]
        pieces = max(tokenizer.get_vocab().values()) + 1
        if pieces > rows:
            raise ValueError(
                f"The tokenizer has ids up to {pieces - 1}, but the model has embeddings for {rows} pieces only: they "
                "do not belong together, or the model was not resized after pieces were added."
            )
        kwargs.pop("local_files_only", None)  # left in by `pipeline()`, which has used it
        super().__init__(model=model, tokenizer=tokenizer, task=task or "translation", **kwargs)
        # Beside the library's own arguments of `generate`, so that a call's `generation_config` replaces these too.
        self._generate_kwargs.update(self._forward_params.pop("generate_kwargs", {}))
        self._is_split_reported = self._is_loss_reported = False
        self.new_tokens = 0

    # ------------------------------------------------------------------ settings
    def _sanitize_parameters(self, **parameters: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} | _OWN_GENERATION_FIELDS
        known |= {"generation_config", "logits_processor", "stopping_criteria", "assistant_model"}
        options = {name: value for name, value in parameters.items() if name in _DEFAULTS}
        generate = {name: value for name, value in parameters.items() if name not in _DEFAULTS}
        for name in generate:
            if name not in known and not hasattr(self.model.generation_config, name):
                near = difflib.get_close_matches(name, [*_DEFAULTS, "batch_size", *known], n=1)
                hint = f" Did you mean `{near[0]}`?" if near else f" Its own: batch_size, {', '.join(_DEFAULTS)}."
                raise TypeError(f"`{name}` is no argument of the translation pipeline nor of `generate`.{hint}")
        for name, allowed in _CHOICES.items():
            if options.get(name, allowed[0]) not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}, got {options[name]!r}.")
        return options, {"generate_kwargs": generate} if generate else {}, {}

    def _settle(self, given: dict[str, Any], generate: dict[str, Any], batch_size: int | None) -> SimpleNamespace:
        """Everything that a call needs to know, from its own arguments, the constructor's, the task and the model."""
        run = SimpleNamespace(**{**_DEFAULTS, **self._preprocess_params, **given})
        explicit = run.src_lang is not None or run.tgt_lang is not None
        named = _direction(self.task) or (None, None)
        run.language, tgt_lang = run.src_lang or named[0], run.tgt_lang or named[1]
        task = f"translation_{run.language}_to_{tgt_lang}" if explicit else self.task
        for_task = (getattr(self.model.config, "task_specific_params", None) or {}).get(task, {})
        if run.prefix is None:
            run.prefix = for_task.get("prefix", self.prefix) or ""
        settled = self._get_set_generation_params({**self._generate_kwargs, **generate})
        extra = {key: for_task[key] for key in for_task.keys() & vars(GenerationConfig()).keys() - settled.keys()}
        if "max_new_tokens" in settled:
            extra.pop("max_length", None)
        run.is_multilingual = hasattr(self.tokenizer, "src_lang")
        # Without languages, `src_lang` can still say which text of a row to read.
        run.needs_rows = run.src_lang is not None and not run.is_multilingual and not for_task
        if run.is_multilingual:
            ids = [self._language_id(code) for code in (run.language, tgt_lang)]
            forced = {**({} if run.tgt_lang else self._generate_kwargs), **generate}
            if ids[1] is not None and "forced_bos_token_id" not in forced:
                extra["forced_bos_token_id"] = ids[1]
        elif run.tgt_lang is not None and not for_task:
            raise ValueError(f"`tgt_lang` is {run.tgt_lang!r}, but this model's tokenizer knows no languages.")
        run.limit = self._longest_input()
        run.generate = self._prepare_generate_kwargs(generate, **extra)
        run.wanted, run.beams = self._setting(run, "num_return_sequences", 1), self._setting(run, "num_beams", 1)
        self._settle_batches(run, self._batch_size if batch_size is None else batch_size)
        if run.wanted > run.beams and not (run.beams == 1 and self._setting(run, "do_sample", False)):
            raise ValueError(f"`num_return_sequences` ({run.wanted}) cannot be more than `num_beams` ({run.beams}).")
        run.is_scored = run.wanted > 1 or run.return_scores
        if run.is_scored:
            # Our models give scores of whole translations; others keep those of every step for them.
            run.keeps_steps = run.beams == 1 or not hasattr(self.model, "_folded_search")
            kept = {"return_dict_in_generate": True, "output_scores" if run.beams > 1 else "output_logits": True}
            kept = kept if run.keeps_steps else {"output_sequence_scores": True}
            run.generate = self._prepare_generate_kwargs(generate, **extra, **kept)
        return run

    def _settle_batches(self, run: SimpleNamespace, batch_size: int | None) -> None:
        """How much is translated at once and read ahead: what was asked for, else what suits the device."""
        rows, tokens, scores = _ON_PROCESSOR if self.model.device.type == "cpu" else _ON_ACCELERATOR
        rows = min(rows, scores // getattr(self.model.config, "vocab_size", 2**15))
        run.batch_size = max(1, rows // run.beams) if batch_size is None else batch_size
        run.batch_tokens = tokens if run.batch_tokens is None else run.batch_tokens
        # A window of one batch of one answers an interactive stream at once; otherwise sorting needs some choice.
        ahead = 1 if batch_size == 1 else _BATCHES_PER_WINDOW
        run.window = ahead if run.window is None else run.window
        for name in ("batch_size", "batch_tokens", "window"):
            if getattr(run, name) < 1:
                raise ValueError(f"`{name}` starts at 1, got {getattr(run, name)}.")

    def _setting(self, run: SimpleNamespace, name: str, default: Any) -> Any:
        """A generation setting as `generate` will see it."""
        configs = (run.generate.get("generation_config"), self.model.generation_config)
        found = [run.generate.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in found if value is not None), default)

    def _longest_input(self) -> int:
        """Tokens that the model can read at once, the end token included."""
        config = self.model.config
        table = getattr(config, "max_position_embeddings", None) or _NO_LIMIT
        said = int(min(self.tokenizer.model_max_length or _NO_LIMIT, _NO_LIMIT))
        # A sinusoid table grows on demand, so what the tokenizer says may well be more than the table's first size.
        grows = getattr(config, "position_encoding", None) == "sinusoidal"
        return said if grows and said < _NO_LIMIT else min(said, table)

    def _language_id(self, code: str | None) -> int | None:
        tokenizer = self.tokenizer
        names = getattr(tokenizer, "lang_code_to_token", None) or getattr(tokenizer, "lang_code_to_id", None)
        names = list(names or tokenizer.all_special_tokens)
        if code is None:
            return None
        if code not in names:
            near = [name for name in names if name.startswith(code[:2])] or difflib.get_close_matches(code, names)
            raise ValueError(f"The tokenizer has no language {code!r}. Near it: {', '.join(near[:5]) or 'none'}.")
        return (
            tokenizer.get_lang_id(code) if hasattr(tokenizer, "get_lang_id") else tokenizer.convert_tokens_to_ids(code)
        )

    # ------------------------------------------------------------------ the call
    def __call__(
        self, inputs: Any, *args: Any, num_workers: int | None = None, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        """Translate one text, or any number of them.

        Args:
            inputs: a `str` or a dict with a text in it; a list of them; or any stream of them: generator, iterator,
                open file, `datasets.Dataset`, torch dataset.
            kwargs: see the class.

        Returns:
            For one text, the list of its candidates, [{"translation_text": ...}]. For a list, a list with one such
            dict per input, or one list of candidates where several are asked for. For a stream, a generator of these.

        Raises:
            ValueError: for an input that is no text, with its number; for text that is too long where that is asked.
        """
        if args:
            raise TypeError(f"The pipeline takes one positional argument, the text, but got {len(args)} more.")
        given, forward, _ = self._sanitize_parameters(**kwargs)
        run = self._settle(given, forward.get("generate_kwargs", {}), batch_size)
        if isinstance(inputs, (str, Mapping)):
            return next(self._stream([inputs], run, is_single=True))
        is_many = hasattr(inputs, "__iter__") or hasattr(inputs, "__getitem__")
        if isinstance(inputs, (bytes, bytearray)) or not is_many:
            raise TypeError(f"`inputs` must be text, or a list or stream of texts, not {type(inputs).__name__}.")
        stream = self._stream(inputs, run)
        results = (candidates if run.wanted > 1 else candidates[0] for candidates in stream)
        return list(results) if isinstance(inputs, Sequence) else results

    def _stream(self, rows: Any, run: SimpleNamespace, is_single: bool = False) -> Iterator[list[dict[str, Any]]]:
        total = len(rows) if hasattr(rows, "__len__") else None
        # A torch dataset need not say where it ends to `iter`, but it has a length.
        iterator = iter(rows) if hasattr(rows, "__iter__") else (rows[i] for i in range(len(rows)))
        wanted = run.progress
        auto = library_logging.is_progress_bar_enabled() and sys.stderr.isatty()
        is_shown = (auto if wanted is None else wanted) and not is_single
        bar = tqdm(
            total=total, disable=not is_shown, delay=0 if wanted else 2, file=sys.stderr, unit="line", desc="translate"
        )
        done = 0
        with bar:
            while window := list(islice(iterator, run.batch_size * run.window)):
                texts = [self._text_of(row, done + i + 1, run) for i, row in enumerate(window)]
                yield from self._translate(texts, done + 1, run, bar.update)
                done += len(window)

    def _text_of(self, row: Any, number: int, run: SimpleNamespace) -> str:
        """The text in one input, which is a string or a dict."""
        value, hint = row, ""
        if isinstance(row, Mapping):
            texts = [name for name, one in row.items() if isinstance(one, str)]
            only = texts[0] if len(texts) == 1 else None
            first = next((name for name in (run.language, "text", "translation") if name in row), only)
            name = run.column if run.column is not None else first
            for key in [name] if name in row else str(name).split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            value = value.get(run.language, value) if isinstance(value, Mapping) else value
            hint = f" It is read from a dict with {list(value if isinstance(value, Mapping) else row)}: say which text"
            hint += " to take with `column` or `src_lang`."
        elif run.needs_rows:
            value, hint = None, f" `src_lang` is {run.src_lang!r}, but this model's tokenizer knows no languages."
        if not isinstance(value, str):
            raise ValueError(f"Input {number} (counted from 1) is {type(value).__name__}, not text.{hint}")
        return value

    def _translate(
        self, texts: list[str], first: int, run: SimpleNamespace, report: Callable[[int], Any]
    ) -> list[list[dict[str, Any]]]:
        """One window of texts, in order: for each, its candidates. `report` hears of texts as they are finished."""
        plans = [cut_text(text, run.lines, run.split_sentences, run.passthrough) for text in texts]
        pieces = [piece for plan in plans for piece, is_copied in plan if not is_copied]
        encoded = iter(self._encode(pieces, run))
        whole: list[list[tuple[str, list[int] | None]]] = []  # per text: pieces with their ids, or without: copied
        for number, plan in enumerate(plans, first):
            whole.append([])
            for piece, is_copied in plan:
                ids = None if is_copied else next(encoded)
                fits = ids is None or len(ids) <= run.limit
                whole[-1] += [(piece, ids)] if fits else self._split_long(piece, len(ids or []), number, run)
        sources = [ids for parts in whole for _, ids in parts if ids is not None]
        owners = [number for number, parts in enumerate(whole) for _, ids in parts if ids is not None]
        open_pieces = Counter(owners)
        report(len(texts) - len(open_pieces))
        outputs: dict[int, list[_Candidate]] = {}
        for batch in self._batches(sources, run):
            model_inputs = self.preprocess([sources[i] for i in batch])
            found = self.postprocess(self.forward(model_inputs, run=run), run, [sources[i] for i in batch])
            outputs.update(zip(batch, found, strict=True))
            open_pieces.subtract(owners[i] for i in batch)
            report(sum(open_pieces[number] == 0 for number in {owners[i] for i in batch}))
        ready = (outputs[i] for i in range(len(sources)))
        return [
            self._put_together(text, [(piece, next(ready) if ids is not None else [(piece, 0.0, ())], ids is None)
                                      for piece, ids in parts], run)
            for text, parts in zip(texts, whole, strict=True)
        ]  # fmt: skip

    def _batches(self, sources: list[list[int]], run: SimpleNamespace) -> Iterator[list[int]]:
        """Indices of the sources, longest first, in batches within both budgets."""
        batch: list[int] = []
        most = run.batch_size
        for i in sorted(range(len(sources)), key=lambda i: -len(sources[i])):
            longest = len(sources[batch[0]]) if batch else len(sources[i])
            if not batch and run.is_scored and run.keeps_steps:
                per_row = run.beams * getattr(self.model.config, "vocab_size", 2**15) * (longest + 50)
                most = max(1, min(run.batch_size, _SCORE_ELEMENTS // per_row))
            if batch and (len(batch) == most or (len(batch) + 1) * longest > run.batch_tokens):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    # ------------------------------------------------------------------ the library's three steps
    def preprocess(self, sources: list[list[int]], **_: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Token ids of B sources as `input_ids` and `attention_mask`, both [B, S], padded on the right."""
        pad = self.tokenizer.pad_token_id
        pad = pad if pad is not None else getattr(self.model.config, "pad_token_id", None) or 0
        rows = [torch.tensor(ids) for ids in sources]
        masks = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return {"input_ids": pad_sequence(rows, batch_first=True, padding_value=pad), "attention_mask": masks}

    def _forward(self, model_inputs: dict[str, torch.Tensor], run: SimpleNamespace) -> dict[str, torch.Tensor]:  # type: ignore
        was_training = self.model.training
        self.model.eval()  # a model fresh from its constructor trains, and dropout would change the translation
        try:
            out = self.model.generate(**model_inputs, **run.generate)
        finally:
            self.model.train(was_training)
        sequences = out if torch.is_tensor(out) else out.sequences
        if not run.is_scored:
            return {"sequences": sequences}
        scores = getattr(out, "sequences_scores", None)
        return {"sequences": sequences, "scores": self._path_scores(out, run) if scores is None else scores}

    def _up_to_end(self, chosen: torch.Tensor, ends: Any) -> torch.Tensor:
        """Marks of the tokens [B, T] up to the first end token of a row, and with it."""
        is_end = torch.isin(chosen, torch.tensor(ends, device=chosen.device))
        return (is_end.cumsum(-1) - is_end.long()) == 0

    def _count_new(self, sequences: torch.Tensor, run: SimpleNamespace) -> int:
        """Tokens of sequences behind their start token: to the end token, or, where there is none, to the padding."""
        chosen, ends = sequences[:, 1:], self._setting(run, "eos_token_id", [])
        is_new, pad = self._up_to_end(chosen, ends), self.tokenizer.pad_token_id
        return int((is_new if pad is None or pad == ends else is_new & (chosen != pad)).sum())

    def _path_scores(self, out: Any, run: SimpleNamespace) -> torch.Tensor:
        """What a beam search would say of sequences that were found without one: [B * candidates]."""
        chosen = out.sequences[:, -len(out.logits) :]  # [B, T]
        steps = [one.float().log_softmax(-1).gather(-1, chosen[:, [t]]) for t, one in enumerate(out.logits)]
        ends = self._setting(run, "eos_token_id", [])
        is_open = self._up_to_end(chosen, ends)
        length = is_open.sum(-1)
        alpha = self._setting(run, "length_penalty", 1.0)
        is_gnmt = self._setting(run, "length_penalty_type", "power") == "gnmt"
        factor = ((5.0 + length) / 6.0) ** alpha if is_gnmt else length**alpha
        return torch.cat(steps, dim=-1).masked_fill(~is_open, 0.0).sum(-1) / factor

    def postprocess(  # type: ignore[override]
        self, model_outputs: dict[str, torch.Tensor], run: SimpleNamespace, sources: list[list[int]]
    ) -> list[list[_Candidate]]:
        """Candidates of every source, best first."""
        sequences = model_outputs["sequences"]
        self.new_tokens += self._count_new(sequences[:: run.wanted], run)
        rows = sequences.tolist()
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        scores = model_outputs["scores"].tolist() if run.is_scored else [0.0] * len(rows)
        flags: list[tuple[str, ...]] = [()] * len(rows)
        if run.return_flags:
            flags = [_flags(row, sources[i // run.wanted], self.tokenizer) for i, row in enumerate(rows)]
        pieces = list(zip(texts, scores, flags, strict=True))
        groups = [pieces[i : i + run.wanted] for i in range(0, len(pieces), run.wanted)]
        return [sorted(group, key=lambda piece: -piece[1]) for group in groups]  # samples come unsorted

    def _put_together(
        self, source: str, parts: list[tuple[str, list[_Candidate], bool]], run: SimpleNamespace
    ) -> list[dict[str, Any]]:
        """Candidates of a whole text from those of its parts (source, candidates, whether copied)."""
        found: dict[str, dict[str, Any]] = {}
        for rank in range(max(len(candidates) for _, candidates, _ in parts)):
            chosen = [candidates[min(rank, len(candidates) - 1)] for _, candidates, _ in parts]
            text, before = "", ""
            for (piece, _, _), (one, _, _) in zip(parts, chosen, strict=True):
                text += " " + one if needs_blank(before, text, one) else one
                before = piece or before
            result: dict[str, Any] = {"translation_text": text}
            if run.is_scored:
                scores = [one[1] for one, (_, _, is_copied) in zip(chosen, parts, strict=True) if not is_copied]
                result["score"] = sum(scores) / len(scores) if scores else 0.0
            # Reserved pieces of the tokenizer, such as `{name}`, have to come through.
            has_codes = getattr(self.tokenizer, "reserved", None)
            lost = ", ".join(self.tokenizer.reserved_mismatch(source, text)) if has_codes else ""
            if run.return_flags:
                flags = [*(flag for one in chosen for flag in one[2]), *([f"reserved: {lost}"] if lost else [])]
                result["flags"] = list(dict.fromkeys(flags))
            elif lost and not self._is_loss_reported:
                self._is_loss_reported = True
                logger.warning("A translation lost or doubled %s. `return_flags=True` marks every such result.", lost)
            found.setdefault(text, result)
        return list(found.values())

    # ------------------------------------------------------------------ tokens, and text with too many of them
    def _encode(self, texts: list[str], run: SimpleNamespace) -> list[list[int]]:
        """Token ids of each text, with its prefix and special tokens."""
        tokenizer, before = self.tokenizer, getattr(self.tokenizer, "src_lang", None)
        is_set = run.is_multilingual and run.language is not None
        try:
            if is_set:
                tokenizer.src_lang = run.language
            prefixed = [run.prefix + text for text in texts]
            return tokenizer(prefixed, truncation=False, verbose=False)["input_ids"] if texts else []
        finally:
            if is_set:
                tokenizer.src_lang = before

    def _split_long(
        self, text: str, length: int, number: int, run: SimpleNamespace
    ) -> list[tuple[str, list[int] | None]]:
        """Parts of a text that is too long, each short enough; nothing is lost between them."""
        problem = f"Input {number} (counted from 1) has a text of {length} tokens, but the model can take {run.limit}."
        if run.long_input == "error":
            raise ValueError(f"{problem} Shorten it, or let it be split with `long_input='split'`.")
        if len(self._encode([""], run)[0]) >= run.limit:
            raise ValueError(f"{problem} Its prefix and special tokens alone leave no room for text.")
        if not self._is_split_reported:
            self._is_split_reported = True
            logger.warning("%s It is translated in parts, as will be all others like it.", problem)
        parts = self._fit(text, run)
        encoded = self._encode(parts[::2], run)
        return [(part, None if i % 2 or not part.strip() else encoded[i // 2]) for i, part in enumerate(parts)]

    def _fit(self, text: str, run: SimpleNamespace) -> list[str]:
        """Pieces that the model can take at the even places, what stood between them at the odd ones."""
        if len(self._encode([text], run)[0]) <= run.limit:
            return [text]
        for cuts in (cutter(text) for cutter in CUTTERS):
            if len(cuts) > 1:
                ends = list(accumulate(map(len, cuts)))
                middle = min(range(1, len(cuts), 2), key=lambda i: abs(ends[i] - len(text) // 2))
                before, after = "".join(cuts[:middle]), "".join(cuts[middle + 1 :])
                return [*self._fit(before, run), cuts[middle], *self._fit(after, run)]
        raise ValueError(f"{text!r} alone is more than the {run.limit} tokens that the model can take.")


def _flags(row: list[int], source: list[int], tokenizer: Any) -> tuple[str, ...]:
    """What looks wrong about one translation, by its token ids and its source's."""
    special = set(tokenizer.all_special_ids)
    out, src = ("".join(chr(one) for one in ids if one not in special) for ids in (row, source))
    repeats = [re.search(r"(.{1,8}?)\1{3}", ids, re.DOTALL) is not None for ids in (out, src)]
    found = {"length_ratio": len(out) + 1 > 3 * (len(src) + 1), "repetition": repeats[0] and not repeats[1]}
    return tuple(name for name, is_so in found.items() if is_so)


def _direction(task: str) -> tuple[str, str] | None:
    """("en", "de") for "translation_en_to_de"."""
    match = re.fullmatch(r"translation_(.+?)_to_(.+)", task)
    return (match.group(1), match.group(2)) if match else None


def register_translation_task() -> None:
    """Bring "translation" and "translation_xx_to_yy" back to `transformers.pipeline`, for every seq2seq model.

    transformers 5 removed the task and refuses its name before it looks into its registry. This takes the name off
    that list of removed tasks, registers the pipeline above unless one is registered already, and teaches the
    registry the names with languages in them. It also gives transformers an empty `TFPreTrainedModel`, since
    `evaluate.evaluator` still asks whether a model is one. Calling it again changes nothing.
    """
    registry = pipelines.PIPELINE_REGISTRY
    if "translation" not in registry.supported_tasks:
        registry.register_pipeline(
            "translation",
            pipeline_class=VaswaniTranslationPipeline,
            pt_model=transformers.AutoModelForSeq2SeqLM,
            type="text",
        )
        # With this mark a saved pipeline would demand `trust_remote_code`, for models of the library as well. The
        # models that need their code beside them have it through their configuration.
        del VaswaniTranslationPipeline._registered_impl  # type: ignore[attr-defined]
    getattr(pipelines, "REMOVED_TASKS", {}).pop("translation", None)
    if not getattr(registry.check_task, "knows_directions", False):
        plain: Any = registry.check_task

        def check_task(task: str) -> tuple[str, dict, Any]:
            direction = None if task in registry.supported_tasks else _direction(task)
            return (*plain("translation")[:2], direction) if direction else plain(task)

        check_task.knows_directions = True  # type: ignore[attr-defined]
        registry.check_task = check_task  # type: ignore[method-assign]
    if not hasattr(transformers, "TFPreTrainedModel"):
        transformers.TFPreTrainedModel = type("TFPreTrainedModel", (), {})  # type: ignore[attr-defined]
