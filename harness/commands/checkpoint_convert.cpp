#include <fmt/ranges.h>

#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "harness/case/network.h"
#include "harness/commands/checkpoint_command.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/shown_reads.h"
#include "harness/train/train_checkpoint.h"
#include "shardproof/algebra/mesh.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/format/torch_file.h"
#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/nn/meta_init.h"

namespace harness {

using namespace shardproof::checkpoint;
using shardproof::DtypeInfo;
using shardproof::Mesh;
using shardproof::Shape;

namespace {

constexpr const char* kModelKey = "model.";  // of parameters in DCP checkpoints

// Null: the dtypes that are there.
const DtypeInfo* dtype_of(const CheckpointArguments& arguments) {
  static const std::map<std::string, std::string> names = {
      {"float32", "float32"}, {"fp32", "float32"}, {"bf16", "bfloat16"}, {"fp16", "float16"}};
  if (arguments.dtype.empty()) return nullptr;
  SHARD_REQUIRE(names.contains(arguments.dtype), "checkpoint", "--dtype takes float32, bf16 or fp16, got '{}'",
                arguments.dtype);
  return shardproof::find_dtype(names.at(arguments.dtype));
}

Projections projections_of(const CheckpointArguments& arguments) {
  if (arguments.projections == "family") return Projections::as_family;
  if (arguments.projections == "fused") return Projections::fused;
  SHARD_REQUIRE(arguments.projections == "separate", "checkpoint", "--projections takes family, fused or separate, got '{}'",
                arguments.projections);
  return Projections::separate;
}

// The shapes of the parameters that the library's model has.
WeightShapes shapes_of_model(const HuggingFaceModel& described) {
  WeightShapes shapes;
  shardproof::MetaInit on_meta;
  std::shared_ptr<torch::nn::Module> module;
  if (const auto* gpt = std::get_if<shardproof::GptOptions>(&described.options))
    module = shardproof::Gpt(*gpt).ptr();
  else
    module = shardproof::Llama(std::get<shardproof::LlamaOptions>(described.options)).ptr();
  for (const auto& item : module->named_parameters()) shapes[item.key()] = item.value().sizes().vec();
  return shapes;
}

bool is_tied(const HuggingFaceModel& model) {
  return std::visit([](const auto& options) { return options.tied; }, model.options);
}

WeightShapes shapes_of(const CheckpointSource& source) {
  WeightShapes shapes;
  for (const auto& [name, spec] : source.tensors()) shapes[name] = spec.sizes;
  return shapes;
}

// Each parameter under its key in a DCP checkpoint. Where a config.json lies beside the weights, all parameters of that model
// are wanted, and projections may be fused in the file.
CheckpointSource::MakeRecipes recipes_in(const CheckpointArguments& arguments) {
  if (arguments.family.empty()) return {};
  require_family(arguments.family);
  return [&arguments](const CheckpointSource& source) {
    const WeightShapes stored = shapes_of(source);
    CheckpointSource::Recipes recipes;
    if (!std::filesystem::exists(source.path() + "/config.json")) {
      for (auto& [name, recipe] : renamed_parameters(arguments.family, stored)) recipes[kModelKey + name] = recipe;
      return recipes;
    }
    const HuggingFaceModel described = read_hugging_face_config(source.path());
    SHARD_REQUIRE(described.family == arguments.family, "checkpoint", "{}/config.json describes a {}, and --family is {}",
                  source.path(), described.family, arguments.family);
    const WeightShapes parameters = shapes_of_model(described);
    for (const auto& [name, shape] : parameters) {
      const auto recipe = parameter_recipe(arguments.family, name, parameters, stored);
      const bool may_be_left_out = name == "lm_head.weight" && is_tied(described);
      SHARD_REQUIRE(recipe || may_be_left_out, "checkpoint", "{}: lacks {}, which the model of its config.json has",
                    source.path(), name);
      if (recipe) recipes[kModelKey + name] = *recipe;
    }
    return recipes;
  };
}

// The parameters of a DCP checkpoint, by its keys. One that is tied is there under each name, in the same bytes; the files of
// the families have it once, without the name of the head.
CheckpointSource::MakeRecipes recipes_out(const CheckpointArguments& arguments) {
  if (arguments.family.empty()) return {};
  require_family(arguments.family);
  return [&arguments](const CheckpointSource& source) {
    const std::string key = kModelKey, head = key + "lm_head.weight";
    const auto& tensors = source.checkpoint().tensors;
    const auto is_parameter = [&](const std::string& name) {
      return name.starts_with(key) && !tensors.at(name).chunks.empty();
    };
    const auto is_head_again = [&](const auto& item) {
      return item.first != head && is_parameter(item.first) &&
             item.second.chunks.front().extent == tensors.at(head).chunks.front().extent;
    };
    const bool tied =
        tensors.contains(head) && is_parameter(head) && std::any_of(tensors.begin(), tensors.end(), is_head_again);
    WeightShapes parameters;
    for (const auto& [name, shape] : shapes_of(source))
      if (is_parameter(name) && !(tied && name == head)) parameters[name.substr(key.size())] = shape;
    CheckpointSource::Recipes recipes = file_recipes(arguments.family, parameters, projections_of(arguments));
    for (auto& [name, recipe] : recipes)
      for (WeightPart& part : recipe.parts) part.name = key + part.name;
    return recipes;
  };
}

// The dtype of most of what is written.
shardproof::Dtype main_dtype(const CheckpointSource& source) {
  std::map<shardproof::Dtype, size_t> counts;
  for (const auto& [name, spec] : source.tensors()) ++counts[spec.dtype];
  return std::max_element(counts.begin(), counts.end(), [](auto& a, auto& b) { return a.second < b.second; })->first;
}

// Of the folder that is written; empty where the model is not known.
std::string config_text(const CheckpointArguments& arguments, const CheckpointSource& source) {
  if (arguments.family.empty()) return "";
  HuggingFaceModel model{.family = arguments.family, .options = {}};
  if (!arguments.config.empty()) {
    model = read_hugging_face_config(arguments.config);
    SHARD_REQUIRE(model.family == arguments.family, "checkpoint", "{} describes a {}, and --family is {}", arguments.config,
                  model.family, arguments.family);
  } else if (const auto saved = model_if_trained(source.path())) {
    model.positions = saved->model.positions();
    if (saved->model.kind == golden::Model::Kind::gpt)
      model.options = gpt_options(saved->model.gpt);
    else
      model.options = llama_options(saved->model.llama);
  } else {
    return "";
  }
  return hugging_face_config(model, main_dtype(source));
}

// One rank's file, opened when something is written to it.
class Files {
 public:
  explicit Files(const std::string& folder) : folder_(folder) {}
  EntryFile& of(int64_t rank) {
    std::unique_ptr<EntryFile>& file = files_[rank];
    if (!file) file = std::make_unique<EntryFile>(system_files(), folder_, entry_file_name(rank));
    return *file;
  }
  void finish() {
    for (auto& [rank, file] : files_) file->finish();
  }

 private:
  const std::string& folder_;
  std::map<int64_t, std::unique_ptr<EntryFile>> files_;
};

// The number of tensors and values that had no other name.
size_t write_dcp(const CheckpointArguments& arguments, int64_t parts) {
  CheckpointSource source(arguments.one, recipes_in(arguments), arguments.entry, dtype_of(arguments));
  ShownReads shown(source, "writing");
  StagedFolder staged(system_files(), arguments.two, arguments.overwrite);
  Files files(staged.path());
  Checkpoint written;
  written.paths = source.checkpoint().paths;
  Checksums checksums;
  for (const auto& [name, extent] : source.checkpoint().values) {
    const auto entry = files.of(0).add_value(source.value(name));
    written.values[name] = entry.extent;
    add(checksums, entry);
  }
  const shardproof::Split split{"dp_shard", {}};
  for (const auto& [name, tensor] : source.tensors()) {
    StoredTensor& stored = written.tensors[name];
    stored = {tensor.dtype, tensor.sizes, {}};
    for (int64_t part = 0; part < (tensor.sizes.empty() ? 1 : parts); ++part) {
      Chunk chunk{Shape(tensor.sizes.size(), 0), tensor.sizes, {}};
      if (!tensor.sizes.empty()) {
        const auto interval = piece(split, tensor.sizes[0], parts, part);
        chunk.offsets[0] = interval.begin;
        chunk.sizes[0] = interval.size();
        if (interval.size() == 0 && part > 0) continue;
      }
      const std::string bytes = shown.read(name, chunk.box());
      const auto entry = files.of(part).add_tensor(tensor.dtype, chunk.sizes, bytes.data());
      chunk.extent = entry.extent;
      add(checksums, entry);
      stored.chunks.push_back(std::move(chunk));
    }
  }
  files.finish();
  write_metadata_files(system_files(), staged.path(), written, checksums);
  staged.commit();
  return source.left_out();
}

void write_torch(const CheckpointArguments& arguments) {
  CheckpointSource source(arguments.one, {}, arguments.entry, dtype_of(arguments));
  ShownReads shown(source, "writing");
  std::map<std::string, Value> values;
  for (const auto& [name, extent] : source.checkpoint().values) values[name] = source.value(name);
  write_staged_file(system_files(), arguments.two, [&](const std::string& path) {
    write_torch_file(system_files(), path, source.tensors(), values, source.checkpoint().paths,
                     [&](const std::string& name) { return shown.read(name); });
  });
}

// The number of plain values that the format has no place for, and of what has no name in the family.
size_t write_safe(const CheckpointArguments& arguments) {
  CheckpointSource source(arguments.one, recipes_out(arguments), arguments.entry, dtype_of(arguments));
  const std::string config = config_text(arguments, source);
  ShownReads shown(source, "writing");
  StagedFolder staged(system_files(), arguments.two, arguments.overwrite);
  if (!config.empty()) write_file(system_files(), staged.path() + "/config.json", config);
  write_safetensors(
      system_files(), staged.path(), source.tensors(), [&](const std::string& name) { return shown.read(name); },
      arguments.file_bytes_max);
  staged.commit();
  return source.checkpoint().values.size() + source.left_out();
}

}  // namespace

int checkpoint_convert(const CheckpointArguments& arguments) {
  SHARD_REQUIRE(arguments.to == "dcp" || arguments.to == "safetensors" || arguments.to == "torch", "checkpoint",
                "--to takes dcp, safetensors or torch, got '{}'", arguments.to);
  SHARD_REQUIRE(arguments.family.empty() || arguments.to != "torch", "checkpoint",
                "--family goes with --to dcp, from files of weights, and with --to safetensors");
  SHARD_REQUIRE((arguments.config.empty() && arguments.projections == "family") ||
                    (!arguments.family.empty() && arguments.to == "safetensors"),
                "checkpoint", "--config and --projections go with --family and --to safetensors");
  JsonLines out(arguments.json);
  size_t left_out = 0;
  if (arguments.to == "dcp") left_out = write_dcp(arguments, 1);
  if (arguments.to == "torch") write_torch(arguments);
  if (arguments.to == "safetensors") left_out = write_safe(arguments);
  if (left_out > 0)
    fmt::print("left out {} {}\n", left_out,
               arguments.family.empty() ? "values that are no tensors, for which safetensors has no place"
                                        : "entries that are no weights of that family, such as the optimizer's state");
  out.write({{"type", "convert"}, {"to", arguments.to}, {"path", arguments.two}, {"left_out", left_out}});
  return 0;
}

int checkpoint_reshard(const CheckpointArguments& arguments) {
  const Mesh mesh = Mesh::parse(arguments.mesh);
  int64_t parts = 1;
  for (const auto& axis : mesh.axes()) {
    SHARD_REQUIRE(axis.name == "dp_shard" || axis.name == "dp_replicate", "checkpoint",
                  "--mesh takes dp_shard and dp_replicate, got {}; how tensors are cut along other axes is the model's matter",
                  axis.name);
    if (axis.name == "dp_shard") parts = axis.size;
  }
  JsonLines out(arguments.json);
  write_dcp(arguments, parts);
  out.write({{"type", "reshard"}, {"mesh", mesh.str()}, {"path", arguments.two}});
  return 0;
}

}  // namespace harness
