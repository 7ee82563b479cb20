// Weights of Hugging Face's transformers package, out of one sharded model and straight into the shards of another.
#include "shardproof/checkpoint/weights.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>

#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/shardproof.h"

using namespace shardproof;

namespace {

// A small Qwen2 with random values, as its maker would publish it.
void publish(const std::string& folder) {
  const checkpoint::HuggingFaceModel described{
      "qwen2", LlamaOptions{.hidden = 32, .heads = 4, .kv_heads = 2, .intermediate = 48, .qkv_bias = true}, 64};
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    Llama model(std::get<LlamaOptions>(described.options));
    initialize_parameters(*model, 1);
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}})), {});
    checkpoint::save_weights(folder, sharded,
                             {.family = described.family,
                              .dtype = Dtype::BFloat16,
                              .config = checkpoint::hugging_face_config(described, Dtype::BFloat16)});
  });
}

void load(const std::string& folder) {
  // A folder as `git clone` of a model gives it: config.json and model.safetensors, or several files and their index.
  const checkpoint::HuggingFaceModel described = checkpoint::read_hugging_face_config(folder);
  const auto options = std::get<LlamaOptions>(described.options);
  run_threads(3, [&](std::shared_ptr<Comm> comm) {
    Llama model(options);
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 3}})),
                                  {.strategy = strategy("zero3"), .units = by_type<LlamaLayerImpl>()});
    const auto loaded = checkpoint::load_weights(folder, sharded, {.family = described.family});
    fmt::print("rank {} read {} bytes of weights\n", comm->rank(), loaded.bytes_read);
  });
}

}  // namespace

int main() {
  const std::string folder =
      (std::filesystem::temp_directory_path() / fmt::format("shardproof_weights_{}", ::getpid())).string();
  publish(folder);
  load(folder);
  std::filesystem::remove_all(folder);
}
