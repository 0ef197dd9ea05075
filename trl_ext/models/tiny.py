"""A tiny random language model with its own tokenizer, made in well under a second: for tests and dry runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL_TYPES = ("llama", "qwen2")
# 256 byte tokens and the special ones must fit, with some room for merges.
MIN_VOCAB_SIZE = 300

# Named as in Qwen2, whose tokenizer class adds this token to any vocabulary that lacks it.
PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# The generation markers let SFT with assistant_only_loss find the assistant's tokens.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}
{{- message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_CORPUS = """\
The quick brown fox jumps over the lazy dog while seventeen wizards watch from the quiet garden.
What is the capital of France? The capital of France is Paris, a city on the river Seine.
Please write a short, polite answer and explain each step of your reasoning before the result.
Reinforcement learning trains a policy from rewards; the value function predicts the return.
A reward model gives a score to every response, and people prefer helpful and harmless ones.
She bought three apples, two oranges and a loaf of bread at the market on Saturday morning.
Water boils at one hundred degrees and freezes at zero; ice floats because it is less dense.
The train leaves the station at nine o'clock, so we should meet near the entrance at half past eight.
My grandmother planted tomatoes, beans and sunflowers behind the old wooden house last spring.
Numbers such as 12, 345 and 6789 are split into digits, letters and symbols: (a + b) * c = d / e.
I am sorry to hear that you feel sad today; would you like to talk about what happened?
Computers store text as bytes, and a tokenizer joins frequent pairs of bytes into longer pieces.
Music, painting and theatre help children to express ideas which they cannot yet put into words.
The doctor recommended plenty of sleep, fresh vegetables and a daily walk through the forest.
Scientists measured the temperature of the ocean and published their careful results in a journal.
Do not share your password with strangers; choose a long phrase that nobody could easily guess.
Once upon a time a clever sailor crossed the northern sea and found an island full of birds.
If the question is unclear, ask for more details instead of making up facts about the world.
Yesterday's football match ended without a goal although both teams attacked until the last minute.
def add(first, second): return first + second  # a function that computes the sum of its arguments
System, user and assistant take turns in a conversation; good assistants answer kindly and briefly.
Mountains, valleys, bridges, engines, kitchens, windows, pictures, languages, histories, economies.
你好，世界！今天天气很好，我们一起去公园散步吧。
法国的首都是哪里？法国的首都是巴黎。
请用简短的语言回答问题，并说明理由。
强化学习通过奖励来训练策略，奖励模型给每个回答打分。
我喜欢读书、听音乐和学习新的语言。
水在一百度沸腾，在零度结冰。
小明有三个苹果，妈妈又给了他两个，现在一共有五个苹果。
人工智能应当诚实、有用，并且不伤害他人。
"""


def build_tiny_model(
    folder: str | Path,
    vocab_size: int = 1024,
    model_type: str = "llama",
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
) -> Path:
    """Save a random causal language model and a byte-level BPE tokenizer with a ChatML template to `folder`.

    The pad token and the end-of-turn token (eos) differ, unlike in many published small models. The same arguments give
    the same weights; the caller's random state is left alone.

    Args:
        folder: where to save; made if missing.
        vocab_size: size of the embedding, at least `MIN_VOCAB_SIZE`. The built-in corpus gives about 1300 tokens;
            beyond that the tokenizer has fewer entries than the embedding.
        model_type: `"llama"` or `"qwen2"`.
        seed: for the weights.
        hidden_size: width; a multiple of 8 (4 attention heads, even head size).
        num_layers: number of decoder layers.

    Raises:
        ValueError: an argument out of its range.
    """
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type must be one of {', '.join(MODEL_TYPES)}; got {model_type!r}")
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE}; got {vocab_size}")
    if hidden_size % 8:
        raise ValueError(f"hidden_size must be a multiple of 8; got {hidden_size}")
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    tokenizer = _train_tokenizer(vocab_size)
    config = _model_config(tokenizer, vocab_size, model_type, hidden_size, num_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _train_tokenizer(vocab_size: int) -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=IM_END,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def _model_config(
    tokenizer: "PreTrainedTokenizerFast", vocab_size: int, model_type: str, hidden_size: int, num_layers: int
) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
