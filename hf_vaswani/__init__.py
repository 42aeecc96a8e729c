"""The 2017 Transformer, exactly, as a translation model of today's Hugging Face stack.

Importing this package registers the model, its configuration and its tokenizer with transformers' Auto classes, and
brings the task "translation" back to `transformers.pipeline`, for this model and for every other seq2seq model.
"""

import gc
from importlib.metadata import version as _installed_version

_TRANSFORMERS_FLOOR = (5, 24)
_found = _installed_version("transformers")
if tuple(int(part) for part in _found.split(".")[:2]) < _TRANSFORMERS_FLOOR:
    raise ImportError(
        f"hf_vaswani needs transformers 5.24 or newer (below 6), found {_found}: 5.24 renamed the decoder's cache "
        'argument, and an older one would decode wrongly without a word. Run: pip install "transformers>=5.24,<6"'
    )

# A fifth of the time of these imports would go into looking for garbage, of which they make none.
_was_collecting = gc.isenabled()
gc.disable()
try:
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

    from .configuration_vaswani import VaswaniConfig
    from .foreign_tokenization_vaswani import VaswaniForeignTokenizer
    from .modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel
    from .pipeline_vaswani import VaswaniTranslationPipeline, register_translation_task
    from .tokenization_vaswani import VaswaniTokenizer
finally:
    if _was_collecting:
        gc.enable()

AutoConfig.register("vaswani", VaswaniConfig, exist_ok=True)
AutoModel.register(VaswaniConfig, VaswaniModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VaswaniConfig, VaswaniForConditionalGeneration, exist_ok=True)
# A saved tokenizer names its class; the last one registered is for a folder that names none.
AutoTokenizer.register(VaswaniConfig, fast_tokenizer_class=VaswaniForeignTokenizer, exist_ok=True)
AutoTokenizer.register(VaswaniConfig, fast_tokenizer_class=VaswaniTokenizer, exist_ok=True)
register_translation_task()

__version__ = "0.1.0"
__all__ = [
    "VaswaniConfig",
    "VaswaniForConditionalGeneration",
    "VaswaniForeignTokenizer",
    "VaswaniModel",
    "VaswaniTokenizer",
    "VaswaniTranslationPipeline",
    "__version__",
]
