// Checkpoints of adapters alone (models/lora.h), in the files and under the names of Hugging Face's PEFT, so that
// peft.PeftModel.from_pretrained opens them over the base model:
//
//   DIRECTORY/adapter_config.json         rank, alpha and the layers' names
//   DIRECTORY/adapter_model.safetensors   "base_model.model.<layer>.lora_A.weight" [rank, inputs] and "...lora_B.weight"
//
// The format is described in PEFT's documentation, "PEFT checkpoint format"
// (https://huggingface.co/docs/peft/developer_guides/checkpoint). Adapters are small: a rank holds all of them whole meanwhile.
#pragma once

#include <string>

#include "shardproof/checkpoint/format/file_system.h"
#include "shardproof/models/lora.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof::checkpoint {

struct AdapterOptions {
  std::string base_model = "";     // what PEFT loads as the base: a name or a path
  std::string module_prefix = "";  // of the layers' names in that model, e.g. "transformer." for GPT-2's
  bool fan_in_fan_out = false;     // whether its layers keep their weights as inputs x outputs, as those of GPT-2 do
  bool overwrite = false;          // whether to replace a directory that exists, atomically; else it is an Error
  FileSystem* files = &system_files();
};

// Saves the main parameters of the adapters. Afterwards the checkpoint is there, whole and durable; when the save fails it is
// not there at all. What fails on one rank throws Error on every rank. So does saving what `merge` has made zero, until it was
// trained again. Collective over the mesh of the Sharded.
void save_adapters(const std::string& directory, Sharded& sharded, const Lora& lora, const AdapterOptions& options = {});

// Loads them, whatever mesh or program saved them, rounded to the main dtype. Throws Error on every rank, and changes nothing,
// when a file is missing or damaged; when rank, alpha or a layer is not as in `lora`, or the config says more than
// plain LoRA's does, known here or not; when a shape does not fit; or when just these adapters were merged into the
// weights of this model (Lora::is_merged), so that they would be added twice. The dropout may differ. Collective over the mesh
// of the Sharded.
void load_adapters(const std::string& directory, Sharded& sharded, const Lora& lora, const AdapterOptions& options = {});

}  // namespace shardproof::checkpoint
