#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/format/row_walk.h"
#include "checkpoint/hugging_face_families.h"
#include "checkpoint/state_names.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/base/nearest.h"
#include "shardproof/checkpoint/format/weight_names.h"
#include "shardproof/checkpoint/weights.h"
#include "shardproof/comm/agree.h"
#include "shardproof/models/lora.h"

namespace shardproof::checkpoint {
namespace {

constexpr int64_t kElementsAtOnce = int64_t{8} << 20;

// Rows of a parameter, and the tensor of the file that has exactly these. `place`: along dim 0; of a stack of matrices the
// matrix, and rows of it; empty of a scalar.
struct SourceOfRows {
  Box place;
  StoredWeight weight;
};
// Of a whole parameter, in the order of rows.
using Sources = std::vector<SourceOfRows>;

class WeightLoader {
 public:
  WeightLoader(const std::string& path, Sharded& sharded, const LoadWeightsOptions& options)
      : path_(path), sharded_(sharded), options_(options), reader_(*options.files) {}

  // Reads what describes the files and finds a place for everything. Throws when something has none.
  void match() {
    stored_ = without_prefix(open_weights(*options_.files, path_, options_.entry));
    for (const auto& [name, weight] : stored_) stored_shapes_[name] = weight.sizes;
    const ModelNames names = names_of_model(sharded_);
    for (const auto& [name, parameter] : names.parameters) {
      shapes_[name] = parameter.sizes;
      for (const std::string& other : parameter.other_names) shapes_[other] = parameter.sizes;
    }
    for (const auto& [name, tensor] : names.plain) shapes_[name] = tensor.sizes().vec();
    for (const auto& [name, parameter] : names.parameters) match_parameter(name, parameter);
    std::set<std::string> parameters;
    for (const auto& item : sharded_.impl().module->named_parameters()) parameters.insert(item.key());
    for (const auto& [name, tensor] : names.plain) match_plain(name, tensor, parameters.contains(name));
    find_unused();
    require_complete();
  }

  void fill() {
    const at::NoGradGuard no_grad;
    for (const Shard& shard : sharded_.impl().shards(Sharded::Impl::Kind::main))
      if (const auto found = sources_.find(shard.name); found != sources_.end()) fill_shard(shard, found->second);
    for (auto& [tensor, sources] : plain_) {
      const at::Tensor values = read(sources, whole_box(tensor.sizes().vec()), tensor.scalar_type());
      at::Tensor(tensor).copy_(values.view(tensor.sizes()));
    }
    if (!options_.partial) sharded_.impl().merged_adapters.clear();
    loaded_.bytes_read = reader_.bytes_read();
  }

  LoadedWeights take() { return std::move(loaded_); }

 private:
  StoredWeights without_prefix(StoredWeights weights) const {
    const std::string& prefix = options_.prefix;
    if (prefix.empty()) return weights;
    StoredWeights result;
    for (const auto& [name, weight] : weights) {
      SHARD_REQUIRE(name.starts_with(prefix), "checkpoint", "{}: {} does not begin with the prefix '{}'", path_, name, prefix);
      result[name.substr(prefix.size())] = weight;
    }
    return result;
  }

  // Each of the names of a tied parameter that the file has.
  void match_parameter(const std::string& name, const ModelParameter& parameter) {
    std::vector<std::string> aliases = {name};
    aliases.insert(aliases.end(), parameter.other_names.begin(), parameter.other_names.end());
    std::vector<Sources> found;
    for (const std::string& alias : aliases)
      if (auto sources = sources_of(alias, parameter.sizes)) found.push_back(std::move(*sources));
    for (const Sources& sources : found) require_floating(name, sources);
    if (found.empty())
      loaded_.missing.push_back(name);
    else
      sources_[name] = std::move(found);
  }

  void match_plain(const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (const auto sources = sources_of(name, tensor.sizes().vec()))
      plain_.emplace_back(tensor, *sources);
    else if (is_parameter || (is_router_bias(name) && has_router_biases(options_.family)))
      loaded_.missing.push_back(name);
  }

  std::optional<Sources> sources_of(const std::string& name, const Shape& shape) {
    const auto recipe = parameter_recipe(options_.family, name, shapes_, stored_shapes_);
    if (!recipe) return std::nullopt;
    Sources sources;
    int64_t rows = 0;
    for (const WeightPart& part : recipe->parts) {
      used_.insert(part.name);
      StoredWeight weight = stored_.at(part.name);
      if (recipe->turned) weight = weight.turned(part.name);
      if (part.rows) weight = weight.rows(part.rows->begin, part.rows->size());
      const int64_t begin = rows;
      if (!weight.sizes.empty()) rows += weight.sizes[0];
      sources.push_back({weight.sizes.empty() ? Box{} : Box{{begin, rows}}, std::move(weight)});
    }
    require_shape(name, shape, *recipe, sources, rows);
    for (int64_t i = 0; recipe->matrices > 0 && i < std::ssize(sources); ++i)
      put_in_stack(sources[static_cast<size_t>(i)], i * recipe->matrices / std::ssize(sources), shape[1]);
    return sources;
  }

  // Makes of a matrix's rows, counted from the first matrix of the stack, a box of the stack.
  static void put_in_stack(SourceOfRows& source, int64_t matrix, int64_t rows) {
    const Interval all = source.place[0];
    source.place = {{matrix, matrix + 1}, {all.begin - matrix * rows, all.end - matrix * rows}};
    source.weight.sizes.insert(source.weight.sizes.begin(), 1);
    source.weight.strides.insert(source.weight.strides.begin(), 0);
  }

  static void require_floating(const std::string& name, const Sources& sources) {
    for (const SourceOfRows& source : sources)
      SHARD_REQUIRE(at::isFloatingType(source.weight.dtype), "checkpoint", "{}: {} is of {} there, expected a floating dtype",
                    source.weight.file, name, dtype_info(source.weight.dtype).name);
  }

  void require_shape(const std::string& name, const Shape& shape, const WeightRecipe& recipe, const Sources& sources,
                     int64_t rows) const {
    const bool stack = recipe.matrices > 0;
    const Shape end = stack ? Shape{shape[1] * shape[0], shape[2]} : shape;  // as rows of matrices, end to end
    const auto fits = [&](const Shape& sizes) {
      return sizes.size() == end.size() && (end.empty() || std::equal(sizes.begin() + 1, sizes.end(), end.begin() + 1)) &&
             (!stack || sizes[0] * std::ssize(sources) == end[0]);
    };
    std::vector<std::string> found, wrong;
    for (size_t i = 0; i < sources.size(); ++i) {
      const std::string& part = recipe.parts[i].name;
      found.push_back(fmt::format("{} [{}]", part, fmt::join(stored_shapes_.at(part), ", ")));
      if (!fits(sources[i].weight.sizes)) wrong.push_back(found.back());
    }
    SHARD_REQUIRE(wrong.empty() && (end.empty() || rows == end[0]), "checkpoint",
                  "{}: {} has the shape [{}] in this model, and the file has {}{}", sources[0].weight.file, name,
                  fmt::join(shape, ", "), first_of(wrong.empty() ? found : wrong),
                  recipe.turned ? ", where matrices are inputs x outputs" : "");
  }

  static std::string first_of(const std::vector<std::string>& list) {
    const int64_t more = std::ssize(list) - 4;
    return fmt::format("{}{}", fmt::join(list.begin(), list.begin() + std::min<int64_t>(4, std::ssize(list)), ", "),
                       more > 0 ? fmt::format(" and {} more", more) : "");
  }

  void find_unused() {
    for (const auto& [name, weight] : stored_)
      if (!used_.contains(name)) loaded_.unused.push_back(name);
  }

  // What is missing. Files of a base have no adapters, and those begin as they were made.
  std::vector<std::string> needed() const {
    const auto is_adapter = [](const auto& item) { return is_adapter_parameter(item.first); };
    if (std::any_of(stored_.begin(), stored_.end(), is_adapter)) return loaded_.missing;
    std::vector<std::string> names;
    for (const std::string& name : loaded_.missing)
      if (!is_adapter_parameter(name)) names.push_back(name);
    return names;
  }

  void require_complete() const {
    if (options_.partial) return;
    const bool may_have_drafts = has_drafts(options_.family) && !loaded_.unused.empty();
    const int64_t drafts = may_have_drafts ? draft_layers(path_, options_.family, *options_.files) : 0;
    std::vector<std::string> unknown;
    for (const std::string& name : loaded_.unused)
      if (!is_no_weight(options_.family, name, shapes_, drafts)) unknown.push_back(name);
    const std::vector<std::string> missing = needed();
    if (missing.empty() && unknown.empty()) return;
    std::vector<std::string> names;
    for (const auto& [name, weight] : stored_) names.push_back(name);
    std::string text;
    if (!missing.empty()) text = fmt::format("the file lacks {}.{}", first_of(missing), did_you_mean(missing[0], names));
    if (!unknown.empty())
      text += fmt::format("{} model has no place for {}.", text.empty() ? "the" : " The", first_of(unknown));
    if (!unknown.empty() && may_have_drafts)
      text += " If these are layers that draft tokens, say how many in num_nextn_predict_layers of config.json.";
    throw Error(message(
        "[checkpoint] {} does not fit this model{}, and nothing was loaded: {} {} (known are {}). A program can load what "
        "fits, by `partial`",
        path_, options_.family.empty() ? "" : " by the names of " + options_.family, text,
        options_.family.empty() ? "Give the family whose names the file has"
                                : "The weights may be those of another model, or of another family",
        fmt::join(weight_families(), ", ")));
  }

  // The box of a parameter, whose rows may come from several tensors, as contiguous values of the dtype.
  at::Tensor read(const Sources& sources, const Box& box, Dtype dtype) {
    const at::Tensor values = at::empty({numel(box)}, dtype);
    int64_t done = 0;
    for (const SourceOfRows& source : sources) {
      Box part = box;
      for (size_t d = 0; d < source.place.size(); ++d)
        part[d] = {std::max(box[d].begin, source.place[d].begin) - source.place[d].begin,
                   std::min(box[d].end, source.place[d].end) - source.place[d].begin};
      if (std::any_of(part.begin(), part.end(), [](const Interval& one) { return one.size() <= 0; })) continue;
      const int64_t count = numel(part);
      const at::Tensor raw = at::empty({count}, source.weight.dtype);
      reader_.read(source.weight, part, raw.mutable_data_ptr());
      values.narrow(0, done, count).copy_(rounded_weight(source.weight.file, raw, dtype));
      done += count;
    }
    SHARD_CHECK(done == values.numel(), "checkpoint", "{} of {} elements of a box have a source", done, values.numel());
    return values;
  }

  void fill_shard(const Shard& shard, const std::vector<Sources>& of_names) {
    int64_t at = 0;
    for (const Box& box : owned(shard.shape, shard.at.mesh, shard.at.layout, sharded_.rank()))
      for (const Box& part : small(box)) {
        const at::Tensor values = read(of_names[0], part, shard.data.scalar_type());
        for (size_t i = 1; i < of_names.size(); ++i)
          SHARD_REQUIRE(read(of_names[i], part, shard.data.scalar_type()).equal(values), "checkpoint",
                        "{}: {} is tied to another parameter of this model, and the file has other values under its other name",
                        path_, shard.name);
        at::Tensor(shard.data).view({-1}).narrow(0, at, values.numel()).copy_(values);
        at += values.numel();
      }
    SHARD_CHECK(at == shard.data.numel(), "checkpoint", "{} of {} elements of {} were loaded", at, shard.data.numel(),
                shard.name);
  }

  // A box in parts of rows, so that little memory is needed beside the shard.
  static std::vector<Box> small(const Box& box) {
    if (box.empty() || numel(box) <= kElementsAtOnce) return {box};
    const int64_t rows = std::max<int64_t>(1, kElementsAtOnce / (numel(box) / box[0].size()));
    std::vector<Box> parts;
    for (int64_t begin = box[0].begin; begin < box[0].end; begin += rows) {
      parts.push_back(box);
      parts.back()[0] = {begin, std::min(begin + rows, box[0].end)};
    }
    return parts;
  }

  const std::string& path_;
  Sharded& sharded_;
  const LoadWeightsOptions& options_;
  WeightReader reader_;
  StoredWeights stored_;
  WeightShapes stored_shapes_, shapes_;
  std::set<std::string> used_;
  std::map<std::string, std::vector<Sources>> sources_;  // of parameters, by their first name; by each name in the file
  std::vector<std::pair<at::Tensor, Sources>> plain_;    // of buffers, and parameters that are not sharded
  LoadedWeights loaded_;
};

}  // namespace

LoadedWeights load_weights(const std::string& path, Sharded& sharded, const LoadWeightsOptions& options) {
  Sharded::Impl& state = sharded.impl();
  state.require_own_values("checkpoint::load_weights");
  Comm& world = state.comms->world();
  WeightLoader loader(path, sharded, options);
  agree_on(world, [&] { loader.match(); });
  state.begin_update();
  std::string error = error_of([&] { loader.fill(); });
  if (!error.empty())
    error +=
        " This was found while loading: the model now has some of the file's values, and some of its own. Load it again "
        "before you use it.";
  agree(world, error);
  sharded.main_parameters_changed();
  return loader.take();
}

}  // namespace shardproof::checkpoint
