"""A TRL script as anyone has it, with three lines more: two of them take turns on one device.

    rlmux broker examples/09_permits.yaml                 prints: export RLMUX_BROKER=unix:...
    RLMUX_JOB=a python examples/own_trl.py --out /tmp/a   in one terminal, with that variable set
    RLMUX_JOB=b python examples/own_trl.py --out /tmp/b   in another one

Without RLMUX_BROKER the same script runs alone, and ends with the same weights. Needs `pip install trl`, on a CPU too.
Where rlmux is not installed: `share.py`, `share_adapters.py` and `share_trl.py` beside this file, and `import share`.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlmux import share  # line 1


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, so that nothing has to be downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*alphabet, "<|end|>", "<|pad|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def share_of_letters(completions: list[str], **_: object) -> list[float]:
    return [sum(sign.isascii() and sign.isalpha() for sign in text) / (1 + len(text)) for text in completions]


def make_trainer(out: str, steps: int, seed: int) -> GRPOTrainer:
    tokenizer = make_tokenizer()
    prompts = Dataset.from_list([{"prompt": f"{number} and {number * 7}: "} for number in range(8 * steps)])
    options = GRPOConfig(
        output_dir=out,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        max_steps=steps,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-3,
        gradient_checkpointing=False,
    )
    return GRPOTrainer(
        model=make_model(tokenizer, seed),
        reward_funcs=share_of_letters,
        args=options,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)),
        processing_class=tokenizer,
    )


def sha256_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    job = share.join("trl")  # line 2
    with job.phase("train"):  # line 3: the model is made on the device, so it is made with a permit
        trainer = share.trl(make_trainer(args.out, args.steps, args.seed), job)
        trainer.train()
        print(f"weights {sha256_of(trainer.model)}, waited {job.waited_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
