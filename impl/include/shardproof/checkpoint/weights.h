// Weights of a model in the files of other programs, straight into a sharded model and out of it.
//
//   const HuggingFaceModel described = read_hugging_face_config("Qwen2.5-0.5B");             // checkpoint/hugging_face.h
//   Llama model(std::get<LlamaOptions>(described.options));                                    // may be on meta
//   Sharded sharded = fully_shard(model.ptr(), comms, {...});                                  // any mesh and strategy
//   load_weights("Qwen2.5-0.5B", sharded, {.family = described.family});
//   ...
//   save_weights("mine", sharded, {.family = described.family, .dtype = Dtype::BFloat16,
//                                  .config = hugging_face_config(described, Dtype::BFloat16)});
//
// A folder that save_weights wrote with a family and a config is one that the package's from_pretrained opens. Both functions
// are collective over the mesh. What fails on one rank throws Error on every rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/checkpoint/format/file_system.h"
#include "shardproof/checkpoint/format/weight_names.h"
#include "shardproof/checkpoint/format/weights_file.h"
#include "shardproof/sharding/fully_shard.h"
#include "shardproof/sharding/rounded_weight.h"

namespace shardproof::checkpoint {

struct LoadWeightsOptions {
  std::string family = "";  // whose names and layouts the file has (format/weight_names.h); "": the model's own names
  std::string entry = "";   // of a file of torch.save: the key of the dict with the weights; "": the file's dict itself
  std::string prefix =
      "";                // what stands before every name in the file, such as "module." of DDP or "_orig_mod." of torch.compile
  bool partial = false;  // whether parameters that the file lacks stay as they are, and tensors without a place are left out
  FileSystem* files = &system_files();
};

// How many layers behind the model's own draft further tokens, and are left out: as many as the config.json beside the weights
// says by num_nextn_predict_layers; 0 where none does, and in families whose models have none.
int64_t draft_layers(const std::string& path, const std::string& family, FileSystem& files = system_files());

struct LoadedWeights {
  std::vector<std::string> missing;  // parameters that the file lacks: adapters, and others if loading is partial
  std::vector<std::string> unused;   // tensors that have no place in the model
  uint64_t bytes_read = 0;           // of weights, by this rank: those of its shards and of buffers, and no others
};

// Loads the weights: each rank reads the elements that it holds, and what describes the files. `path` is what open_weights
// takes. Values are rounded to the dtype of the main parameters. A buffer is loaded if the file has it. A tied parameter may be
// in the file under one of its names or under several, with the same values. Adapters (models/lora.h) stay as they are if the
// file has none at all, as a file of their base. Optimizer state stays as it is. Throws Error, and changes nothing, when any
// other parameter or a tensor has no counterpart and loading is not partial, when a shape does not fit, or when a file is
// missing or does not describe weights. Values go straight into the shards, so an error while reading leaves the model loaded
// in part; its message says so, and another load mends it.
LoadedWeights load_weights(const std::string& path, Sharded& sharded, const LoadWeightsOptions& options = {});

struct SaveWeightsOptions {
  std::string family = "";     // as above
  Dtype dtype = Dtype::Float;  // of the file: values are rounded to it
  Projections projections = Projections::as_family;
  std::string config = "";                      // the text of config.json; "": none is written
  uint64_t file_bytes_max = uint64_t{5} << 30;  // weights of more bytes become several files and their index
  bool overwrite = false;                       // whether to replace a folder that exists, atomically; else it is an Error
  FileSystem* files = &system_files();
};

// Saves the main parameters, each tied one once, and of buffers the biases of routers, in float32, as a folder with
// model.safetensors. Afterwards it is there,
// whole and durable; when the save fails it is not there at all. Each rank holds one whole parameter at a time, or the experts
// of a layer, and rank 0 writes.
void save_weights(const std::string& folder, Sharded& sharded, const SaveWeightsOptions& options = {});

}  // namespace shardproof::checkpoint
