// The folder of a Hugging Face model as what a run starts from: config.json says which model it is, and each rank reads the
// weights that it holds.
#pragma once

#include <string>

#include "golden/golden.h"
#include "shardproof/sharding/fully_shard.h"

namespace harness {

// Its positions are those that config.json names. Throws Error, which names the file, when it is not there or describes a model
// that the library does not have.
golden::Model model_of_weights(const std::string& folder);

// With what `text`, that of --model, says of losses and capacities of routers, which no config.json does; and of the rate of
// their biases, where the model has these.
golden::Model with_busy_experts(golden::Model model, const std::string& text);

// Throws Error when `text`, that of --model, says something else than the model. It names what differs, and `source`, where the
// model was read. What the text leaves out is as there.
void require_same_model(const std::string& text, const golden::Model& model, const std::string& source);

// Throws Error when the model knows more tokens than there are bytes, because text was given to it. `where` is the command,
// `to_do` what it needs instead: "Give token files".
void require_bytes(const golden::Model& model, const std::string& folder, const char* where, const char* to_do);

// Into the main parameters. Collective over the mesh of the Sharded. Throws Error as checkpoint::load_weights does.
void load_weights_of(const std::string& folder, shardproof::Sharded& sharded);

// For a model that is made on the device meta and whose shards are filled afterwards. `device`: where they will be.
void fill_shards_later(shardproof::ShardOptions& options, c10::Device device);

}  // namespace harness
