#include "shardproof/models/lora.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "internal/hooks/attachments.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/base/name_pattern.h"
#include "shardproof/models/models.h"
#include "shardproof/nn/dropout.h"
#include "shardproof/nn/initialize.h"
#include "internal/device/fingerprint.h"

namespace shardproof {
namespace {

constexpr const char* kDown = "lora_A";
constexpr const char* kUp = "lora_B";
constexpr const char* kDropout = "lora_dropout";

// W x + scale * B (A x). A and B are entered as the layers that they are, so that they may be cut.
class LinearAdapter final : public AdapterHooks {
 public:
  // `dropout`: of what A gets; null: none.
  LinearAdapter(std::weak_ptr<void> state, Linear down, Linear up, Dropout dropout, double scale)
      : state_(std::move(state)), down_(std::move(down)), up_(std::move(up)), dropout_(std::move(dropout)), scale_(scale) {}
  at::Tensor add_to(const at::Tensor& output, const at::Tensor& input) override {
    const at::Tensor kept = dropout_.is_empty() ? input : call(dropout_, input);
    return output + call(up_, call(down_, kept)) * scale_;
  }
  std::shared_ptr<void> held() const override { return state_.lock(); }

 private:
  std::weak_ptr<void> state_;  // which owns this
  Linear down_, up_;
  Dropout dropout_;
  double scale_;
};

// Uniform numbers that are exact in float32, and the same on any machine.
void fill_uniform(const at::Tensor& weight, const std::string& name, uint64_t seed) {
  const auto bound = 1 / std::sqrt(static_cast<double>(std::max<int64_t>(1, weight.size(1))));
  const at::Tensor values = at::empty({weight.numel()}, at::kFloat);
  uniform_initializer(seed, bound)(name, weight.sizes().vec(), {0, weight.numel()}, values);
  weight.copy_(values.view(weight.sizes()));
}

bool is_adapter(const std::string& name) {
  return name.ends_with(std::string(".") + kDown) || name.ends_with(std::string(".") + kUp);
}

std::string weight_of(const std::string& layer) {
  return layer.empty() ? "weight" : layer + ".weight";
}

const ParallelStyle* style_of(const ParallelPlan& plan, const std::string& layer) {
  for (const auto& [pattern, style] : plan.styles)
    if (name_matches(pattern, layer)) return &style;
  return nullptr;
}

// Of the dropout of what a layer of this style gets. A layer that is whole has it below itself.
std::optional<ParallelStyle> dropout_style(const ParallelStyle& style, int64_t inputs) {
  if (std::holds_alternative<ColumnParallel>(style)) return SequenceParallel{};
  const auto* row = std::get_if<RowParallel>(&style);
  if (!row || !row->input_is_parallel) return std::nullopt;
  // Granules of one element are dealt out as the even cut deals out elements.
  return CutDropout{.dim = -1, .segments = row->segments.empty() ? std::vector<CutSegment>{{inputs}} : row->segments};
}

// scale * B A for the elements of a run of the product's rows.
at::Tensor product_of(const at::Tensor& up, const at::Tensor& down, Interval run, double scale) {
  const int64_t inputs = down.size(1), begin = run.begin / inputs, end = (run.end + inputs - 1) / inputs;
  at::Tensor sum = at::zeros({end - begin, inputs}, down.options());
  const at::Tensor rows = up.narrow(0, begin, end - begin);
  for (int64_t k = 0; k < down.size(0); ++k) sum.add_(rows.narrow(1, k, 1) * down.narrow(0, k, 1));
  return sum.mul_(scale).view({-1}).narrow(0, run.begin - begin * inputs, run.size());
}

// Throws Error unless the product can be added to the weight of the layer, and nothing else computes with that weight. Layers
// that are one module under two names have the same adapter as well.
void require_own_weight(const Sharded::Impl& sharded, const std::string& layer) {
  const auto first_of = [&](const std::string& name) {
    const auto found = std::ranges::find(sharded.aliases, name, [](const auto& alias) { return alias.first; });
    return found == sharded.aliases.end() ? "" : found->second;
  };
  const std::string weight = first_of(weight_of(layer)), adapter = first_of(adapter_parameters(layer).a);
  SHARD_REQUIRE(
      !weight.empty(), "lora",
      "merge: the weight of layer '{}' is no parameter of this Sharded (is it ignored?), so the adapter has nothing to "
      "be added to, and nothing was merged. Save the adapters instead",
      layer);
  for (const auto& [name, first] : sharded.aliases) {
    if (first != weight || name == weight_of(layer)) continue;
    const std::string other = name.substr(0, name.size() - std::min(name.size(), std::string_view(".weight").size()));
    SHARD_REQUIRE(first_of(adapter_parameters(other).a) == adapter, "lora",
                  "merge: the weight of layer '{}' is '{}' too, which would compute something else with the adapter in it, so "
                  "nothing was merged. Untie the two before add_lora, or save the adapters instead",
                  layer, name);
  }
}

// Of the values of all adapters, taken together layer by layer. The dtype does not matter.
class AdaptersFingerprint {
 public:
  void add(const at::Tensor& down, const at::Tensor& up) {
    for (const at::Tensor& values : {down, up})
      print_ = combined(print_, fingerprint(values.to(at::kCPU, at::kDouble).contiguous().view({-1})));
    is_zero_ = is_zero_ && up.count_nonzero().item<int64_t>() == 0;
  }
  bool is_zero() const { return is_zero_; }  // these adapters add nothing
  std::string str() const { return fmt::format("{:016x}", print_); }

 private:
  uint64_t print_ = 0;
  bool is_zero_ = true;
};

}  // namespace

struct Lora::State {
  LoraOptions options;
  std::vector<std::string> layers;
  std::map<std::string, int64_t> inputs;  // how many features each layer takes
  AdapterAttachments attached;
  std::unique_ptr<SequentialEntries> sequential;
};

const std::vector<std::string>& Lora::layers() const {
  return state_->layers;
}
const LoraOptions& Lora::options() const {
  return state_->options;
}
double Lora::scale() const {
  return state_->options.alpha / static_cast<double>(state_->options.rank);
}

ParallelPlan Lora::with_styles(ParallelPlan plan) const {
  std::vector<std::pair<std::string, ParallelStyle>> added;
  for (const std::string& layer : layers()) {
    const ParallelStyle* style = style_of(plan, layer);
    if (!style || std::holds_alternative<PartialGradients>(*style)) continue;
    const std::string below = layer + ".", down = below + kDown, up = below + kUp;
    if (options().dropout > 0) {
      SHARD_REQUIRE(state_->inputs.contains(layer), "lora",
                    "how many features layer '{}' takes is not known; give described_lora "
                    "its inputs",
                    layer);
      if (const auto dropped = dropout_style(*style, state_->inputs.at(layer))) added.emplace_back(below + kDropout, *dropped);
    }
    if (const auto* column = std::get_if<ColumnParallel>(style)) {
      added.emplace_back(down, SequenceParallel{});
      added.emplace_back(up, *column);
    } else if (const auto* row = std::get_if<RowParallel>(style)) {
      added.emplace_back(down, *row);
      added.emplace_back(up, SequenceParallel{});
    } else {
      SHARD_REQUIRE(std::holds_alternative<SequenceParallel>(*style), "lora",
                    "layer '{}' has an adapter, and a style that is not one of a linear layer", layer);
    }
  }
  plan.styles.insert(plan.styles.begin(), added.begin(), added.end());
  return plan;
}

void Lora::merge(Sharded& sharded) const {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> zeros;
  AdaptersFingerprint print;
  sharded.write_parameters({});  // waits for ranks that still read parameters, and refuses a bad moment
  for (const std::string& layer : layers()) require_own_weight(sharded.impl(), layer);
  for (const std::string& layer : layers()) {
    const AdapterParameters names = adapter_parameters(layer);
    const at::Tensor down = sharded.gather_main_parameter(names.a), up = sharded.gather_main_parameter(names.b);
    zeros[names.b] = at::zeros_like(up);
    print.add(down, up);
    for (const Piece& piece : sharded.main_parameters())
      if (piece.name == weight_of(layer))
        at::Tensor(piece.data).add_(product_of(up, down, piece.run, scale()).to(piece.data.device()));
  }
  sharded.write_parameters(zeros);
  if (!print.is_zero()) sharded.impl().merged_adapters.push_back(print.str());
}

bool Lora::is_merged(const Sharded& sharded) const {
  return !sharded.impl().merged_adapters.empty();
}

// Values of a file are compared as they would be in the model, where their dtype may be narrower.
bool Lora::is_merged(const Sharded& sharded, const std::map<std::string, at::Tensor>& values) const {
  const std::vector<std::string>& merged = sharded.impl().merged_adapters;
  if (merged.empty()) return false;
  std::map<std::string, at::ScalarType> dtypes;
  for (const Shard& shard : sharded.impl().shards(Sharded::Impl::Kind::main)) dtypes[shard.name] = shard.data.scalar_type();
  AdaptersFingerprint print;
  for (const std::string& layer : layers()) {
    const AdapterParameters names = adapter_parameters(layer);
    print.add(values.at(names.a).to(dtypes.at(names.a)), values.at(names.b).to(dtypes.at(names.b)));
  }
  return std::ranges::find(merged, print.str()) != merged.end();
}

AdapterParameters adapter_parameters(const std::string& layer) {
  const std::string below = layer.empty() ? "" : layer + ".";
  return {weight_of(below + kDown), weight_of(below + kUp)};
}

bool is_adapter_parameter(const std::string& name) {
  const AdapterParameters ends = adapter_parameters("");
  const auto is = [&](const std::string& end) { return ("." + name).ends_with("." + end); };
  return is(ends.a) || is(ends.b);
}

Lora add_lora(std::shared_ptr<torch::nn::Module> module, LoraOptions options) {
  const at::NoGradGuard no_grad;
  SHARD_REQUIRE(options.rank >= 1, "lora", "the rank must be at least 1, got {}", options.rank);
  SHARD_REQUIRE(!options.targets.empty(), "lora", "no targets: name the linear layers that get adapters");
  SHARD_REQUIRE(options.dropout >= 0 && options.dropout < 1, "lora", "the dropout must be at least 0 and below 1, got {}",
                options.dropout);
  if (options.alpha == 0) options.alpha = 2 * static_cast<double>(options.rank);
  auto state = std::make_shared<Lora::State>();
  std::vector<bool> used(options.targets.size(), false);
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> chosen;
  for (const auto& item : module->named_modules("", /*include_self=*/true)) {
    SHARD_REQUIRE(!parallel_hooks(*item.value()) && !unit_hooks(*item.value()), "lora",
                  "module '{}' is parallel or sharded already; call add_lora before parallelize and fully_shard", item.key());
    if (!item.value()->as<torch::nn::LinearImpl>() || is_adapter(item.key())) continue;
    bool wanted = false;
    for (size_t i = 0; i < used.size(); ++i)
      if (name_matches(options.targets[i], item.key())) wanted = used[i] = true;
    if (wanted) chosen.emplace_back(item.key(), item.value());
  }
  for (size_t i = 0; i < used.size(); ++i)
    SHARD_REQUIRE(used[i], "lora", "target '{}' fits no torch::nn::Linear of {}", options.targets[i], module->name());
  for (const at::Tensor& parameter : module->parameters()) parameter.set_requires_grad(false);
  const double scale = options.alpha / static_cast<double>(options.rank);
  for (const auto& [name, layer] : chosen) {
    const at::Tensor& weight = layer->as<torch::nn::LinearImpl>()->weight;
    SHARD_REQUIRE(!adapter_hooks(*layer), "lora", "layer '{}' has an adapter already", name);
    SHARD_REQUIRE(!weight.is_meta(), "lora", "layer '{}' is on the meta device; give adapters to a model that has memory",
                  name);
    Linear down(torch::nn::LinearOptions(weight.size(1), options.rank).bias(false));
    Linear up(torch::nn::LinearOptions(options.rank, weight.size(0)).bias(false));
    for (Linear part : {down, up}) part->to(weight.device(), weight.scalar_type());
    fill_uniform(down->weight, adapter_parameters(name).a, options.seed);
    up->weight.zero_();
    layer->register_module(kDown, down);
    layer->register_module(kUp, up);
    Dropout dropout{nullptr};
    if (options.dropout > 0) dropout = layer->register_module(kDropout, Dropout(options.dropout));
    state->layers.push_back(name);
    state->inputs[name] = weight.size(1);
    state->attached.attach(layer, std::make_shared<LinearAdapter>(state, down, up, dropout, scale));
  }
  state->options = std::move(options);
  state->sequential = std::make_unique<SequentialEntries>(*module);
  return Lora(std::move(state));
}

Lora described_lora(std::vector<std::string> layers, LoraOptions options, std::map<std::string, int64_t> inputs) {
  SHARD_REQUIRE(options.rank >= 1, "lora", "the rank must be at least 1, got {}", options.rank);
  auto state = std::make_shared<Lora::State>();
  if (options.alpha == 0) options.alpha = 2 * static_cast<double>(options.rank);
  state->layers = std::move(layers);
  state->inputs = std::move(inputs);
  state->options = std::move(options);
  return Lora(std::move(state));
}

}  // namespace shardproof
