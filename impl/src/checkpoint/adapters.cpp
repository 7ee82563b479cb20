#include "shardproof/checkpoint/adapters.h"

#include <ATen/ATen.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/comm/agree.h"

namespace shardproof::checkpoint {
namespace {

constexpr const char* kConfig = "/adapter_config.json";
constexpr const char* kWeights = "/adapter_model.safetensors";
constexpr uint64_t kConfigBytesMax = 1 << 24;

// The names of A and B in the file and in the model.
std::map<std::string, std::string> names_of(const Lora& lora, const AdapterOptions& options) {
  std::map<std::string, std::string> names;
  for (const std::string& layer : lora.layers()) {
    const AdapterParameters own = adapter_parameters(layer);
    for (const std::string& name : {own.a, own.b}) names["base_model.model." + options.module_prefix + name] = name;
  }
  return names;
}

std::string config_of(const Lora& lora, const AdapterOptions& options) {
  std::vector<std::string> targets;
  for (const std::string& layer : lora.layers()) targets.push_back(options.module_prefix + layer);
  const nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                         {"auto_mapping", nullptr},
                                         {"base_model_name_or_path", options.base_model},
                                         {"revision", nullptr},
                                         {"task_type", nullptr},
                                         {"inference_mode", true},
                                         {"r", lora.options().rank},
                                         {"lora_alpha", lora.options().alpha},
                                         {"lora_dropout", lora.options().dropout},
                                         {"target_modules", targets},
                                         {"fan_in_fan_out", options.fan_in_fan_out},
                                         {"bias", "none"},
                                         {"modules_to_save", nullptr}};
  return config.dump(2) + "\n";
}

// Whether the entry of the config leaves the adapters plain. The format is open: each release of PEFT has further variants,
// some of which have the tensors of the plain one. So what is not known here must be off.
bool is_plain(const std::string& key, const nlohmann::json& value) {
  // Compared elsewhere, or without a say in what is computed.
  static const std::set<std::string> free = {"peft_type",           "auto_mapping",
                                             "peft_version",        "revision",
                                             "task_type",           "base_model_name_or_path",
                                             "inference_mode",      "r",
                                             "lora_alpha",          "lora_dropout",
                                             "target_modules",      "exclude_modules",
                                             "layers_to_transform", "layers_pattern",
                                             "fan_in_fan_out",      "megatron_core",
                                             "qalora_group_size"};
  static const std::set<std::string> by_layer = {"rank_pattern", "alpha_pattern", "loftq_config"};
  if (value.is_null() || value == false || free.contains(key)) return true;
  if (by_layer.contains(key)) return value.is_object() && value.empty();
  if (key == "bias") return value == "none";
  // Other initialisations change the base as well.
  if (key == "init_lora_weights") return value == true || value == "gaussian" || value == "orthogonal";
  return false;
}

void require_config(const std::string& path, const std::string& text, const Lora& lora) {
  const nlohmann::json config = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const bool describes_lora = config.is_object() && config.contains("peft_type") && config["peft_type"] == "LORA";
  SHARD_REQUIRE(describes_lora, "lora", "{} does not describe LoRA adapters: it has no \"peft_type\": \"LORA\"", path);
  const auto number = [&](const char* key) {
    SHARD_REQUIRE(config.contains(key) && config[key].is_number(), "lora", "{} has no number '{}'", path, key);
    return config[key].get<double>();
  };
  SHARD_REQUIRE(number("r") == static_cast<double>(lora.options().rank) && number("lora_alpha") == lora.options().alpha, "lora",
                "{} has adapters of rank {} and alpha {}, and this model of rank {} and alpha {}", path, number("r"),
                number("lora_alpha"), lora.options().rank, lora.options().alpha);
  for (const auto& [key, value] : config.items())
    SHARD_REQUIRE(
        is_plain(key, value), "lora",
        "{} has \"{}\": {}, with which adapters may compute something else than W x + alpha / rank * B (A x), so they "
        "were not loaded. Let PEFT merge them into the base, or convert them to plain LoRA",
        path, key, value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

at::Tensor read_tensor(FileSystem& files, const SafeTensor& stored) {
  at::Tensor tensor = at::empty(stored.sizes, stored.dtype);
  if (stored.bytes > 0) FileSource(files, stored.file).read(stored.offset, tensor.mutable_data_ptr(), stored.bytes);
  return tensor;
}

// After a merge B is zero until it trains again.
void require_something_to_save(const Lora& lora, const Sharded& sharded, const std::map<std::string, at::Tensor>& values) {
  if (!lora.is_merged(sharded)) return;
  for (const std::string& layer : lora.layers())
    if (values.at(adapter_parameters(layer).b).count_nonzero().item<int64_t>() > 0) return;
  throw Error(
      "[lora] these adapters were merged into the weights of their layers, here or before the checkpoint was saved that this "
      "run "
      "loaded. Now B of each is zero, so a checkpoint of them would have nothing of what they learned. Save adapters before "
      "merge, or the merged model with save_weights");
}

void require_not_merged(const std::string& directory, const Lora& lora, const Sharded& sharded,
                        const std::map<std::string, at::Tensor>& values) {
  SHARD_REQUIRE(!lora.is_merged(sharded, values), "lora",
                "the weights of this model have the adapters in {} already: they were merged into them, here or before the "
                "checkpoint was saved that this run loaded. They would be added twice, so nothing was loaded. Load the weights "
                "of the base first, or a checkpoint from before the merge",
                directory);
}

// By the names of the model.
std::map<std::string, at::Tensor> read_adapters(const std::string& directory, const Lora& lora, const AdapterOptions& options) {
  require_config(directory + kConfig, read_file(*options.files, directory + kConfig, kConfigBytesMax), lora);
  const SafeTensors stored = open_safetensors(*options.files, directory + kWeights);
  std::map<std::string, std::string> names = names_of(lora, options);
  std::map<std::string, at::Tensor> values;
  for (const auto& [name, tensor] : stored.tensors) {
    const auto found = names.find(name);
    SHARD_REQUIRE(found != names.end(), "lora", "{} has {}, and this model has no such adapter", directory + kWeights, name);
    values[found->second] = read_tensor(*options.files, tensor);
    names.erase(found);
  }
  SHARD_REQUIRE(names.empty(), "lora", "{} lacks {}", directory + kWeights, names.begin()->first);
  return values;
}

}  // namespace

void save_adapters(const std::string& directory, Sharded& sharded, const Lora& lora, const AdapterOptions& options) {
  std::map<std::string, at::Tensor> values;
  std::map<std::string, SafeTensorSpec> specs;
  const std::map<std::string, std::string> names = names_of(lora, options);
  for (const auto& [name, own] : names) {
    values[own] = sharded.gather_main_parameter(own).to(at::kCPU).contiguous();
    specs[name] = {values[own].scalar_type(), values[own].sizes().vec()};
  }
  require_something_to_save(lora, sharded, values);
  from_rank_0(sharded.impl().comms->world(), [&] {
    StagedFolder folder(*options.files, directory, options.overwrite);
    write_file(*options.files, folder.path() + kConfig, config_of(lora, options));
    write_safetensors_file(*options.files, folder.path() + kWeights, specs, [&](const std::string& name) {
      const at::Tensor& tensor = values.at(names.at(name));
      return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    });
    folder.commit();
    return std::string();
  });
}

void load_adapters(const std::string& directory, Sharded& sharded, const Lora& lora, const AdapterOptions& options) {
  std::map<std::string, at::Tensor> values;
  agree_on(sharded.impl().comms->world(), [&] {
    values = read_adapters(directory, lora, options);
    require_not_merged(directory, lora, sharded, values);
  });
  sharded.write_parameters(values);
}

}  // namespace shardproof::checkpoint
