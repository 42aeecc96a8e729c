"""Cuts lines as the real programs do; run in an environment with subword-nmt or sentencepiece in it.

Reads a JSON file, its only argument: a list of jobs. Writes the list of their results to standard output.
"""

import json
import sys
import tempfile
from pathlib import Path


def subword_nmt(job):
    from subword_nmt.apply_bpe import BPE

    known = None if job["known"] is None else set(job["known"])
    with open(job["codes"], encoding="utf-8") as codes:
        program = BPE(codes, separator=job["continuation"], vocab=known)
    return [program.process_line(line) for line in job["lines"]]


def sentencepiece(job):
    import sentencepiece as library

    path = job["model"]
    if "train" in job:  # a model made for the occasion, which the test then gets to read
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as text:
            text.write("\n".join(job["text"]))
            text.flush()
            library.SentencePieceTrainer.train(
                input=text.name,
                model_prefix=str(Path(path).with_suffix("")),
                minloglevel=2,
                num_threads=1,
                **job["train"],
            )
    program = library.SentencePieceProcessor(model_file=path)
    if job["known"] is not None:
        program.SetVocabulary(job["known"])
    pieces = [program.encode(line, out_type=str) for line in job["lines"]]
    # With a vocabulary the library no longer knows a byte piece for one, and spells it out.
    return [pieces, [program.decode(one) for one in pieces] if job["known"] is None else None]


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    json.dump(
        [{"subword-nmt": subword_nmt, "sentencepiece": sentencepiece}[job["program"]](job) for job in jobs], sys.stdout
    )
