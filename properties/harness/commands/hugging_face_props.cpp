// The names and layouts of Hugging Face's transformers package, to the library's models and back.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "harness/commands/checkpoint_command.h"
#include "properties/kit/bits.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/parallel_models.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/checkpoint/format/weight_names.h"
#include "shardproof/checkpoint/saved_state.h"

using namespace shardproof;
using checkpoint::Scratch;
using checkpoint::system_files;

namespace {

std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().contiguous();
  return {static_cast<const char*>(values.const_data_ptr()), values.nbytes()};
}

// What the package would have saved, by the definition of its layouts: projections of GPT-2 are inputs x outputs.
void write_as_package(const std::string& folder, const torch::nn::Module& module, bool gpt2) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : module.named_parameters()) {
    const bool projection = gpt2 && item.key().starts_with("h.") && item.value().dim() == 2;
    const bool head = item.key() == "lm_head.weight";
    if (head && gpt2) continue;  // tied: the package saves it once
    const std::string name = (gpt2 ? "transformer." : "") + item.key();
    tensors[name] = projection ? item.value().t().contiguous() : item.value();
  }
  std::map<std::string, checkpoint::SafeTensorSpec> specs;
  for (const auto& [name, tensor] : tensors) specs[name] = {tensor.scalar_type(), tensor.sizes().vec()};
  checkpoint::write_safetensors(system_files(), folder, specs,
                                [&](const std::string& name) { return bytes_of(tensors[name]); });
}

using Make = std::function<std::shared_ptr<torch::nn::Module>()>;

void expect_loaded(const Make& make, bool gpt2) {
  const Scratch scratch;
  const std::shared_ptr<torch::nn::Module> from = make();
  initialize_parameters(*from, 7, 0.3);
  const std::string theirs = scratch / "theirs", ours = scratch / "ours";
  ASSERT_EQ(::mkdir(theirs.c_str(), 0777), 0);
  write_as_package(theirs, *from, gpt2);
  EXPECT_EQ(harness::checkpoint_convert({.one = theirs, .two = ours, .to = "dcp", .family = gpt2 ? "gpt2" : "llama"}), 0);
  const auto expected = from->named_parameters();
  run_threads(3, [&](std::shared_ptr<Comm> comm) {
    Sharded sharded = fully_shard(make(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 3}})), {});
    checkpoint::load(ours, sharded, nullptr);
    for (const auto& [name, value] : sharded.gather_parameters()) EXPECT_TRUE(kit::same_bits(value, expected[name])) << name;
  });
}

}  // namespace

TEST(HuggingFace, what_the_package_saved_is_loaded_to_the_bit) {
  expect_loaded([] { return Gpt(parallel_models::gpt_options(true)).ptr(); }, /*gpt2=*/true);
  const LlamaOptions options{.hidden = 12, .heads = 3, .kv_heads = 1, .intermediate = 10, .vocab = 13};
  expect_loaded([options] { return Llama(options).ptr(); }, /*gpt2=*/false);
}

TEST(HuggingFace, names_go_and_come_back) {
  using namespace shardproof::checkpoint;
  const WeightShapes parameters = {{"wte.weight", {5, 4}},
                                   {"h.0.attn.c_attn.weight", {12, 4}},
                                   {"h.11.mlp.c_proj.weight", {4, 16}},
                                   {"h.1.attn.c_attn.bias", {12}},
                                   {"lm_head.weight", {5, 4}},
                                   {"model.layers.0.self_attn.q_proj.weight", {4, 4}},
                                   {"model.norm.weight", {4}}};
  for (const std::string& family : weight_families()) {
    WeightShapes stored;
    for (const auto& [name, recipe] : file_recipes(family, parameters)) {
      ASSERT_EQ(recipe.parts.size(), 1);
      stored[name] = parameters.at(recipe.parts[0].name);
      if (recipe.turned) std::swap(stored[name][0], stored[name][1]);
    }
    EXPECT_EQ(stored.size(), parameters.size());
    EXPECT_EQ(stored.contains("transformer.wte.weight"), family == "gpt2");
    for (const auto& [name, shape] : parameters) {
      const auto recipe = parameter_recipe(family, name, parameters, stored);
      ASSERT_TRUE(recipe) << name;
      EXPECT_EQ(recipe->turned, family == "gpt2" && name.starts_with("h.") && shape.size() == 2) << name;
    }
  }
  EXPECT_TRUE(is_no_weight("gpt2", "transformer.h.0.attn.bias", {}));
}
