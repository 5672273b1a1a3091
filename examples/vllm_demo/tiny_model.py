"""Models for speculative decoding, made offline in seconds, with an answer that can be worked out by hand.

The target is a real Llama whose layers add nothing, so its next token depends on the current token alone:

    a -> b -> ... -> z -> a      0 -> 1 -> ... -> 9 -> 0      A -> B -> ... -> Z -> </s>      anything else -> a

The tokenizer has one token for each byte. A prompt with the alphabet in it lets n-gram drafts be right; a stop at `i`
or a limit of 7 tokens falls inside a block of drafts, where trimming matters. The draft model (vLLM's `draft_model`)
is the same but wrong after `h` and `q`; the EAGLE head (`eagle`) agrees with the target always.

Importing this module is cheap; making the models imports torch, transformers, tokenizers and safetensors (some 15 s
cold, 10 MB on disk), once for each folder. Run as `python -m examples.vllm_demo.tiny_model DIR`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VERSION = "1"
"""Names the folder that `ensure_models` makes: raise it with any change to what is made."""

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
EOS = SPECIAL_TOKENS.index("</s>")
VOCABULARY_SIZE = len(SPECIAL_TOKENS) + 256
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# Wide enough that every token has a direction of its own: the transitions are then exact, on any machine.
_HIDDEN = 320
_HEAD = 64
# The chosen token leads by this much after the norm: sampling at temperature 1 is as good as greedy (n > 1 needs it).
_LEAD = 60.0
# Elsewhere the lower id leads, by far less: what a grammar leaves open is still one answer, not a tie.
_ORDER = 0.01
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


class ModelError(RuntimeError):
    """A model that was just made does not do what it was made for."""


@dataclass(frozen=True)
class Models:
    """Where the three models are: the target, the draft model and the EAGLE head."""

    target: Path
    draft: Path
    eagle: Path


def token_id(character: str) -> int:
    """The id of a visible ASCII character (`!` to `~`); ValueError for anything else.

    Byte-level tokenizers write these bytes as themselves, and the vocabulary is sorted, so no tokenizer is needed.
    """
    if len(character) != 1 or not "!" <= character <= "~":
        raise ValueError(f"not one visible ASCII character: {character!r}")
    return len(SPECIAL_TOKENS) + ord(character) - ord("!")


def transitions(deviations: Mapping[str, str] | None = None) -> list[int]:
    """The next token of every token, by id; `deviations` (from, to) go over the target's own rules."""
    following = [token_id("a")] * VOCABULARY_SIZE
    for ring in (LETTERS, DIGITS):
        for here, there in zip(ring, ring[1:] + ring[0], strict=True):
            following[token_id(here)] = token_id(there)
    for here, there in pairwise(CAPITALS):
        following[token_id(here)] = token_id(there)
    following[token_id("Z")] = EOS
    for here, there in (deviations or {}).items():
        following[token_id(here)] = token_id(there)
    return following


DRAFT_DEVIATIONS: Mapping[str, str] = {"h": "a", "q": "b"}
"""Where the draft model is wrong: each costs the rest of that block of drafts."""


def greedy(last: str, limit: int, *, ignore_eos: bool = False) -> list[int]:
    """The token ids that the target gives after `last` (one visible character), up to `limit` or with its `</s>`."""
    following, token, answer = transitions(), token_id(last), list[int]()
    while len(answer) < limit and (ignore_eos or token != EOS):
        token = following[token]
        answer.append(token)
    return answer


def make_target(path: Path) -> Path:
    """Write the target model and its tokenizer into `path` (made where missing); ModelError if it goes wrong."""
    return _make_llama(path, transitions())


def make_draft(source: Path, path: Path) -> Path:
    """Write a draft model for the target in `source`, with the same tokenizer, wrong after `h` and `q`."""
    _make_llama(path, transitions(DRAFT_DEVIATIONS))
    if _read_json(source / "config.json")["vocab_size"] != VOCABULARY_SIZE:
        raise ModelError("the draft model needs the vocabulary of its target")
    return path


def make_eagle(source: Path, path: Path) -> Path:
    """Write an EAGLE head for the target in `source`; it needs no tokenizer and shares the target's `lm_head`.

    Its `fc` keeps the token's embedding and drops the hidden state, and its layer adds nothing, as in the target.
    """
    import torch
    from safetensors.torch import load_file, save_file

    path.mkdir(parents=True, exist_ok=True)
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    keep_embedding = torch.cat([torch.eye(_HIDDEN), torch.zeros(_HIDDEN, _HIDDEN)], dim=1)
    head = {"fc.weight": keep_embedding, "embed_tokens.weight": embedding}
    for name, weight in weights.items():
        # vLLM's EAGLE has no norm before its first layer (llama_eagle.py: DecoderLayer.disable_input_layernorm).
        if name.startswith("model.layers.0.") and "input_layernorm" not in name:
            head[name.removeprefix("model.")] = weight

    hidden = torch.randn(VOCABULARY_SIZE, _HIDDEN, generator=torch.Generator().manual_seed(1))
    logits = torch.cat([embedding, hidden], dim=1) @ keep_embedding.T @ weights["lm_head.weight"].T
    _check("EAGLE head", logits, transitions())
    save_file({name: weight.contiguous() for name, weight in head.items()}, path / "model.safetensors")
    shutil.copyfile(source / "config.json", path / "config.json")
    return path


def ensure_models(folder: Path) -> Models:
    """The three models under `folder`, made if they are not there yet.

    They are made beside their place and moved in whole, so a run that was killed leaves nothing half made, and of two
    that run at once one wins and both use its models.
    """
    home = folder / f"tiny-{VERSION}"
    if not home.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
        try:
            make_target(making / "target")
            make_draft(making / "target", making / "draft")
            make_eagle(making / "target", making / "eagle")
            making.chmod(0o755)
            with contextlib.suppress(OSError):  # another process was first; anything else shows just below
                os.rename(making, home)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        if not home.is_dir():
            raise ModelError(f"could not put the models into {home}")
    return Models(target=home / "target", draft=home / "draft", eagle=home / "eagle")


def _make_llama(path: Path, following: list[int]) -> Path:
    """Write a Llama with these transitions, checked on transformers' own Llama first."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(path)
    config = _config()
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    # strict: every weight that this Llama has is one of ours
    model.load_state_dict(_weights(following), strict=True)
    with torch.no_grad():
        # One sequence of every token: were the layers to add anything, the tokens before would change the answer.
        logits = model(torch.arange(VOCABULARY_SIZE)[None]).logits[0]
    _check("Llama", logits, following)
    save_file(
        {name: weight.contiguous() for name, weight in model.state_dict().items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 3})
    return path


def _config() -> dict[str, Any]:
    """The model's `config.json`, readable by transformers 4 (`rope_theta`, `torch_dtype`) and 5 (`dtype`)."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY_SIZE,
        "hidden_size": _HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": _HEAD, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 3,
        "dtype": "float32", "torch_dtype": "float32",
    }  # fmt: skip


def _weights(following: list[int]) -> dict[str, Tensor]:
    """The weights of the Llama with these transitions; the same on every machine."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    embedding = torch.zeros(VOCABULARY_SIZE, _HIDDEN)
    embedding[range(VOCABULARY_SIZE), range(VOCABULARY_SIZE)] = 1.0
    head = torch.zeros(VOCABULARY_SIZE, _HIDDEN)
    head[:, :VOCABULARY_SIZE] = -_ORDER * torch.arange(VOCABULARY_SIZE)[:, None]
    head[following, range(VOCABULARY_SIZE)] += _LEAD
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": head / _HIDDEN**0.5,  # the norm makes a one-hot vector this long
        layer + "input_layernorm.weight": torch.ones(_HIDDEN),
        layer + "post_attention_layernorm.weight": torch.ones(_HIDDEN),
        layer + "self_attn.q_proj.weight": noise(4 * _HEAD, _HIDDEN),
        layer + "self_attn.k_proj.weight": noise(2 * _HEAD, _HIDDEN),
        layer + "self_attn.v_proj.weight": noise(2 * _HEAD, _HIDDEN),
        layer + "self_attn.o_proj.weight": torch.zeros(_HIDDEN, 4 * _HEAD),  # attention runs and adds nothing
        layer + "mlp.gate_proj.weight": noise(64, _HIDDEN),
        layer + "mlp.up_proj.weight": noise(64, _HIDDEN),
        layer + "mlp.down_proj.weight": torch.zeros(_HIDDEN, 64),
    }


def _write_tokenizer(path: Path) -> None:
    """Write the byte-level tokenizer; ModelError if it does not number characters as `token_id` does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    sample = LETTERS + DIGITS + CAPITALS + '{"~!:'
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE or tokenizer.encode(sample).ids != [*map(token_id, sample)]:
        raise ModelError("the tokenizer numbers its tokens in another way than expected")
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(path / "tokenizer_config.json", {
        # transformers 5 would write a class that 4 does not know; this one both know
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, "clean_up_tokenization_spaces": False,
        "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "chat_template": _CHAT_TEMPLATE,
    })  # fmt: skip


def _check(what: str, logits: Tensor, following: list[int]) -> None:
    """ModelError unless the highest logit of each row is that row's transition."""
    wrong = [here for here, there in enumerate(logits.argmax(-1).tolist()) if there != following[here]]
    if wrong:
        raise ModelError(f"{what}: {len(wrong)} of {len(following)} transitions are wrong, the first after {wrong[0]}")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} holds no object")
    return value


def main() -> None:
    """Make the models in the folder of the command line and say where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.vllm_demo.tiny_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where to put them (made where missing, reused where complete)")
    made = ensure_models(parser.parse_args().folder)
    print(f"target {made.target}\ndraft  {made.draft}\neagle  {made.eagle}")


if __name__ == "__main__":
    main()
