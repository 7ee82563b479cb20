#include <fmt/ranges.h>

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "harness/case/axes.h"
#include "harness/case/model_fields.h"
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
#include "shardproof/checkpoint/weights.h"
#include "shardproof/nn/meta_init.h"

namespace harness {

using namespace shardproof::checkpoint;
using shardproof::DtypeInfo;
using shardproof::Mesh;
using shardproof::Shape;

namespace {

constexpr const char* kModelKey = "model.";  // of parameters in DCP checkpoints
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kConfig = "/config.json";
constexpr const char* kGeneration = "/generation_config.json";
constexpr uint64_t kDescriptionBytesMax = 1 << 24;

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

// The shapes of what the library's model has: parameters, and biases of routers.
WeightShapes shapes_of_model(const HuggingFaceModel& described) {
  WeightShapes shapes;
  shardproof::MetaInit on_meta;
  std::shared_ptr<torch::nn::Module> module;
  if (const auto* gpt = std::get_if<shardproof::GptOptions>(&described.options))
    module = shardproof::Gpt(*gpt).ptr();
  else
    module = shardproof::Llama(std::get<shardproof::LlamaOptions>(described.options)).ptr();
  for (const auto& list : {module->named_parameters(), module->named_buffers()})
    for (const auto& item : list) shapes[item.key()] = item.value().sizes().vec();
  return shapes;
}

bool is_tied(const HuggingFaceModel& model) {
  return std::visit([](const auto& options) { return options.tied; }, model.options);
}

// What the weights of the head are, where it is tied.
std::string embedding_of(const HuggingFaceModel& model) {
  return model.family == "gpt2" ? "wte.weight" : "model.embed_tokens.weight";
}

WeightShapes shapes_of(const CheckpointSource& source) {
  WeightShapes shapes;
  for (const auto& [name, spec] : source.tensors()) shapes[name] = spec.sizes;
  return shapes;
}

// Throws Error unless these are the parameters of the model. A head that is tied may be there, and need not.
void require_parameters(const std::string& path, const HuggingFaceModel& model, WeightShapes found) {
  std::vector<std::string> wrong;
  for (const auto& [name, shape] : shapes_of_model(model)) {
    const auto own = found.extract(name);
    if (own.empty() && !(name == kHead && is_tied(model))) wrong.push_back("it lacks " + name);
    if (!own.empty() && own.mapped() != shape)
      wrong.push_back(fmt::format("{} is [{}] and not [{}]", name, fmt::join(own.mapped(), ", "), fmt::join(shape, ", ")));
  }
  for (const auto& [name, shape] : found) wrong.push_back(fmt::format("the model has no place for {}", name));
  SHARD_REQUIRE(wrong.empty(), "checkpoint",
                "{} has not the parameters of the {} that its config.json, or --config, describes: {}{}", path, model.family,
                fmt::join(wrong.begin(), wrong.begin() + std::min<int64_t>(4, std::ssize(wrong)), "; "),
                wrong.size() > 4 ? fmt::format("; and {} more", wrong.size() - 4) : "");
}

// Throws Error when the head of a tied model has values of its own. The names are those of `source`.
void require_tied(CheckpointSource& source, const std::string& head, const std::string& embedding) {
  SHARD_REQUIRE(source.read(head) == source.read(embedding), "checkpoint",
                "{}: the head of this model is tied to {}, and {} has other values", source.path(), embedding, head);
}

// Each parameter under its key in a DCP checkpoint. Where a config.json lies beside the weights, they must be those of that
// model, as for `train --weights`, and projections may be fused in the file.
CheckpointSource::MakeRecipes recipes_in(const CheckpointArguments& arguments) {
  if (arguments.family.empty()) return {};
  require_family(arguments.family);
  return [&arguments](CheckpointSource& source) {
    const WeightShapes stored = shapes_of(source);
    CheckpointSource::Recipes recipes;
    if (!std::filesystem::exists(source.path() + kConfig)) {
      for (auto& [name, recipe] : renamed_parameters(arguments.family, stored)) recipes[kModelKey + name] = recipe;
      return recipes;
    }
    const HuggingFaceModel described = read_hugging_face_config(source.path());
    SHARD_REQUIRE(described.family == arguments.family, "checkpoint", "{}/config.json describes a {}, and --family is {}",
                  source.path(), described.family, arguments.family);
    const WeightShapes parameters = shapes_of_model(described);
    WeightShapes found, unused = stored;
    for (const auto& [name, shape] : parameters) {
      const auto recipe = parameter_recipe(arguments.family, name, parameters, stored);
      if (!recipe) continue;
      recipes[kModelKey + name] = *recipe;
      found[name] = source.made_by(name, *recipe).sizes;
      for (const WeightPart& part : recipe->parts) unused.erase(part.name);
    }
    const int64_t drafts = draft_layers(source.path(), arguments.family);
    std::erase_if(unused, [&](const auto& item) { return is_no_weight(arguments.family, item.first, parameters, drafts); });
    found.merge(unused);
    require_parameters(source.path(), described, found);
    if (is_tied(described) && stored.contains(kHead))
      require_tied(source, kHead, recipes.at(kModelKey + embedding_of(described)).parts[0].name);
    return recipes;
  };
}

// What the checkpoint says of its model: in the files that `convert` keeps beside it, or in what `train` wrote into it.
std::optional<HuggingFaceModel> own_model(const std::string& path, const std::string& family) {
  const auto saved = model_if_trained(path);
  if (saved && saved->described.family.empty()) {
    const golden::Model& model = saved->model;
    HuggingFaceModel described{.family = family, .options = llama_options(model.llama), .positions = model.positions()};
    if (model.kind == golden::Model::Kind::gpt) described.options = gpt_options(model.gpt);
    return described;
  }
  if (saved) return saved->described;
  if (!std::filesystem::exists(path + kConfig)) return std::nullopt;
  return read_hugging_face_config(path);
}

// That of --config, which must not contradict the checkpoint, or else what the checkpoint says itself.
std::optional<HuggingFaceModel> model_of(const CheckpointArguments& arguments, const std::string& path) {
  const std::optional<HuggingFaceModel> own = own_model(path, arguments.family);
  if (arguments.config.empty() && !own) return std::nullopt;
  HuggingFaceModel model = arguments.config.empty() ? *own : read_hugging_face_config(arguments.config);
  SHARD_REQUIRE(model.family == arguments.family, "checkpoint", "{} describes a {}, and --family is {}",
                arguments.config.empty() ? path : arguments.config, model.family, arguments.family);
  if (arguments.config.empty() || !own) return model;
  const golden::Model given = described_model(model);
  golden::Model there = described_model(*own);
  there.llama.document_end = given.llama.document_end;  // it is of the data, and no config.json says it
  for (const ModelField& field : model_fields(given.kind))
    SHARD_REQUIRE(given.kind == there.kind && field.text(given) == field.text(there), "checkpoint",
                  "--config {} says '{}', and the checkpoint {} is of a model with '{}' (nothing: the usual {}). Leave out "
                  "--config, which the checkpoint knows itself",
                  arguments.config, field.text(given), path, field.text(there), field.key);
  if (model.generation.empty()) model.generation = own->generation;
  return model;
}

// The parameters of a DCP checkpoint, by its keys. One that is tied is there under each name, in the same bytes; the files of
// the families have it once, without the name of the head. `model`: where it is known, which is written there.
CheckpointSource::MakeRecipes recipes_out(const CheckpointArguments& arguments, std::optional<HuggingFaceModel>& model) {
  if (arguments.family.empty()) return {};
  require_family(arguments.family);
  return [&](CheckpointSource& source) {
    const bool is_dcp = std::filesystem::exists(source.path() + "/" + kMetadataFile);
    SHARD_REQUIRE(is_dcp || !std::filesystem::exists(source.path() + kConfig), "checkpoint",
                  "{} has the names of the package already. Leave out --family", source.path());
    const std::string key = kModelKey, head = key + kHead;
    const auto& tensors = source.checkpoint().tensors;
    const auto is_parameter = [&](const std::string& name) {
      return name.starts_with(key) && !tensors.at(name).chunks.empty();
    };
    const auto is_head_again = [&](const auto& item) {
      return item.first != head && is_parameter(item.first) &&
             item.second.chunks.front().extent == tensors.at(head).chunks.front().extent;
    };
    bool tied = tensors.contains(head) && is_parameter(head) && std::any_of(tensors.begin(), tensors.end(), is_head_again);
    model = model_of(arguments, source.path());
    if (model && is_tied(*model) && tensors.contains(head) && !tied) {
      require_tied(source, head, key + embedding_of(*model));
      tied = true;
    }
    WeightShapes parameters;
    for (const auto& [name, shape] : shapes_of(source))
      if (is_parameter(name) && !(tied && name == head)) parameters[name.substr(key.size())] = shape;
    if (model) require_parameters(source.path(), *model, parameters);
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

// One rank's file, opened when something is written to it.
class Files {
 public:
  Files(FileSystem& files, const std::string& folder) : system_(files), folder_(folder) {}
  EntryFile& of(int64_t rank) {
    std::unique_ptr<EntryFile>& file = files_[rank];
    if (!file) file = std::make_unique<EntryFile>(system_, folder_, entry_file_name(rank));
    return *file;
  }
  void finish() {
    for (auto& [rank, file] : files_) file->finish();
  }

 private:
  FileSystem& system_;
  const std::string& folder_;
  std::map<int64_t, std::unique_ptr<EntryFile>> files_;
};

// Keeps what a folder says of its model beside the weights, in the dtype that they have now.
void keep_descriptions(FileSystem& files, const CheckpointSource& source, const std::string& folder, const DtypeInfo* dtype) {
  for (const char* file : {kConfig, kGeneration}) {
    if (!std::filesystem::is_regular_file(source.path() + file)) continue;
    std::string text = read_file(system_files(), source.path() + file, kDescriptionBytesMax);
    nlohmann::json values = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    for (const char* key : {"dtype", "torch_dtype"})
      if (dtype && values.is_object() && values.contains(key)) {
        values[key] = dtype->name;
        text = values.dump(2) + "\n";
      }
    write_file(files, folder + file, text);
  }
}

// The number of tensors and values that had no other name.
size_t write_dcp(const CheckpointArguments& arguments, int64_t parts) {
  CheckpointSource source(arguments.one, recipes_in(arguments), arguments.entry, dtype_of(arguments));
  ShownReads shown(source, "writing");
  StagedFolder staged(*arguments.files, arguments.two, arguments.overwrite);
  Files files(*arguments.files, staged.path());
  Checkpoint written;
  written.paths = source.checkpoint().paths;
  Checksums checksums;
  for (const auto& [name, extent] : source.checkpoint().values) {
    const auto entry = files.of(0).add_value(source.value(name));
    written.values[name] = entry.extent;
    add(checksums, entry);
  }
  const shardproof::Split split{axes::dp_shard, {}};
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
  keep_descriptions(*arguments.files, source, staged.path(), dtype_of(arguments));
  write_metadata_files(*arguments.files, staged.path(), written, checksums);
  staged.commit();
  return source.left_out();
}

void write_torch(const CheckpointArguments& arguments) {
  CheckpointSource source(arguments.one, {}, arguments.entry, dtype_of(arguments));
  ShownReads shown(source, "writing");
  std::map<std::string, Value> values;
  for (const auto& [name, extent] : source.checkpoint().values) values[name] = source.value(name);
  write_staged_file(*arguments.files, arguments.two, [&](const std::string& path) {
    write_torch_file(*arguments.files, path, source.tensors(), values, source.checkpoint().paths,
                     [&](const std::string& name) { return shown.read(name); });
  });
}

// The number of plain values that the format has no place for, and of what has no name in the family.
size_t write_safe(const CheckpointArguments& arguments) {
  std::optional<HuggingFaceModel> model;
  CheckpointSource source(arguments.one, recipes_out(arguments, model), arguments.entry, dtype_of(arguments));
  ShownReads shown(source, "writing");
  StagedFolder staged(*arguments.files, arguments.two, arguments.overwrite);
  if (model) write_file(*arguments.files, staged.path() + kConfig, hugging_face_config(*model, main_dtype(source)));
  if (model && !model->generation.empty()) write_file(*arguments.files, staged.path() + kGeneration, model->generation);
  if (arguments.family.empty() && !std::filesystem::exists(source.path() + "/" + kMetadataFile))
    keep_descriptions(*arguments.files, source, staged.path(), dtype_of(arguments));
  write_safetensors(
      *arguments.files, staged.path(), source.tensors(), [&](const std::string& name) { return shown.read(name); },
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
    SHARD_REQUIRE(axis.name == axes::dp_shard || axis.name == axes::dp_replicate, "checkpoint",
                  "--mesh takes dp_shard and dp_replicate, got {}; how tensors are cut along other axes is the model's matter",
                  axis.name);
    if (axis.name == axes::dp_shard) parts = axis.size;
  }
  JsonLines out(arguments.json);
  write_dcp(arguments, parts);
  out.write({{"type", "reshard"}, {"mesh", mesh.str()}, {"path", arguments.two}});
  return 0;
}

}  // namespace harness
