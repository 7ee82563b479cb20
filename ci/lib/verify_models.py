"""shardproof.verify of three models of transformers on a device: random cases beside plain PyTorch.

    PYTHONPATH=build/python python ci/lib/verify_models.py [--device cuda] [--cases N | --minutes N] [--seed N]
"""
import argparse
import sys

NO_GPU = "CUDA cannot be used here: no GPU"
SIZE = dict(vocab_size=64, use_cache=False, bos_token_id=0, eos_token_id=0)


def models():
    """Name -> what makes the model."""
    import transformers as t

    llama = dict(SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
    qwen = dict(llama, head_dim=8)
    gpt2 = dict(SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return {"Llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**llama)),
            "GPT-2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2)),
            "Qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**qwen))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", type=int, help="of each model")
    parser.add_argument("--minutes", type=float, help="for all models together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch

    import shardproof

    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return 2
    failed, made = [], models()
    for name, make in made.items():
        try:
            report = shardproof.verify(
                lambda make=make: make().to(options.device),
                lambda: torch.randint(0, SIZE["vocab_size"], (2, 8)).to(options.device),
                lambda model, tokens: model(input_ids=tokens, labels=tokens).loss, cases=options.cases, seed=options.seed,
                minutes=options.minutes and options.minutes / len(made), progress=False)
            print(f"{name} on {options.device}: {str(report).splitlines()[-1]}", flush=True)
        except Exception as error:  # pylint: disable=broad-except
            print(f"{name} on {options.device}: {type(error).__name__}: {error}", flush=True)
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(made)} models held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
