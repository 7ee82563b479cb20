#include <CLI/CLI.hpp>
#include <memory>

#include "harness/commands/checkpoint_command.h"
#include "harness/commands/commands.h"

namespace harness {

void add_checkpoint_command(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<CheckpointArguments>();
  CheckpointArguments* a = arguments.get();
  CLI::App* command = app.add_subcommand("checkpoint", "look at, verify, compare and convert checkpoints");
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* text, int (*run)(const CheckpointArguments&), bool two) {
    CLI::App* sub = command->add_subcommand(name, text);
    sub->add_option("A", a->one, "a folder with .metadata; or safetensors")->required();
    if (two) sub->add_option("B", a->two, "the other, or what is written")->required();
    sub->add_option("--json", a->json, "also write one JSON object a line here");
    sub->callback([arguments, run, &exit_code] { exit_code = run(*arguments); });
    return sub;
  };
  add("inspect", "tensors, shapes, dtypes, boxes, values", checkpoint_inspect, false)
      ->add_flag("--boxes", a->boxes, "also where each box lies");
  add("verify", "every byte of a DCP folder against its checksums; 1: damaged", checkpoint_verify, false);
  add("diff", "bit by bit; 1: they differ", checkpoint_diff, true);
  CLI::App* convert = add("convert", "write A as B in another format", checkpoint_convert, true);
  convert->add_option("--to", a->to, "dcp, safetensors (folders) or torch (a file)")->capture_default_str();
  convert->add_option("--file-bytes-max", a->file_bytes_max, "of a safetensors file")->capture_default_str();
  convert->add_option("--family", a->family, "gpt2 or llama: safetensors are those of Hugging Face's transformers");
  convert->add_flag("--overwrite", a->overwrite, "exchange a folder B that exists");
  CLI::App* reshard = add("reshard", "write A as the ranks of a mesh would, into folder B", checkpoint_reshard, true);
  reshard->add_option("--mesh", a->mesh, "such as dp_shard=4")->required();
  reshard->add_flag("--overwrite", a->overwrite, "exchange a folder B that exists");
}

}  // namespace harness
