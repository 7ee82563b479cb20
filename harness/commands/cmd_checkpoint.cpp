#include <CLI/CLI.hpp>
#include <memory>

#include "harness/commands/checkpoint_command.h"
#include "harness/commands/commands.h"
#include "harness/commands/usage.h"

namespace harness {

void add_checkpoint_command(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<CheckpointArguments>();
  CheckpointArguments* a = arguments.get();
  CLI::App* command = app.add_subcommand("checkpoint", "look at, verify, compare and convert checkpoints");
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* text, int (*run)(const CheckpointArguments&), bool two) {
    CLI::App* sub = command->add_subcommand(name, text);
    sub->add_option("A", a->one, "a folder with .metadata, safetensors, or what torch.save wrote of tensors")->required();
    if (two) sub->add_option("B", a->two, "the checkpoint to compare with, or the one to write")->required();
    sub->add_option("--json", a->json, "also write JSON objects to this file, one a line");
    add_verbosity(*sub, "show no progress");
    sub->callback([arguments, run, &exit_code] { exit_code = run(*arguments); });
    return sub;
  };
  add("inspect", "print names, shapes, dtypes, numbers of boxes, and values", checkpoint_inspect, false)
      ->add_flag("--boxes", a->boxes, "also print where each box lies");
  add("verify", "check every byte of a DCP folder against its checksums; exit code 1: it is damaged", checkpoint_verify, false);
  add("diff", "compare A and B bit by bit; exit code 1: they differ", checkpoint_diff, true);
  CLI::App* convert = add("convert", "write A as B in another format", checkpoint_convert, true);
  convert->add_option("--to", a->to, "the format: dcp or safetensors, which are folders, or torch, which is a file")
      ->capture_default_str();
  convert->add_option("--file-bytes-max", a->file_bytes_max, "the largest number of bytes of a safetensors file")
      ->capture_default_str();
  convert->add_option(
      "--family", a->family,
      "gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, dots1, glm4_moe or deepseek_v3: files of weights have the "
      "names of this family in Hugging Face's transformers");
  convert->add_option("--config", a->config,
                      "with --family: the config.json of the model, for a folder that from_pretrained opens; a checkpoint of "
                      "`train` says it itself");
  convert->add_option("--projections", a->projections,
                      "with --family: family, or fused or separate queries, keys and values, and gates")
      ->capture_default_str();
  convert->add_option("--dtype", a->dtype, "round floating tensors to float32, bf16 or fp16; by default they stay as they are");
  convert->add_option("--entry", a->entry, "of a torch.save file A: the key of the dict with the weights, such as model");
  convert->add_flag("--overwrite", a->overwrite, "replace a folder B that exists");
  CLI::App* reshard = add("reshard", "write A as the ranks of a mesh would, into folder B", checkpoint_reshard, true);
  reshard->add_option("--mesh", a->mesh, "the mesh, such as dp_shard=4")->required();
  reshard->add_flag("--overwrite", a->overwrite, "replace a folder B that exists");
}

}  // namespace harness
