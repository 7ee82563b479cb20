// The library's language models in bfloat16 and float16 beside those of the transformers package in the same precision. Each
// has a distance from its own float64 run; roundings are part of what a model is, and ours may be no coarser than theirs.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <iterator>
#include <set>
#include <sstream>

#include "golden/hugging_face.h"
#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/shardproof.h"

using namespace shardproof;

namespace {

constexpr int64_t kVocab = 61, kSeeds = 8;
constexpr double kRatio = 1.5;

struct Kind {
  const char* name;
  std::string family;
  LlamaOptions options;
};

std::vector<Kind> kinds() {
  const LlamaOptions plain{
      .layers = 2, .hidden = 48, .heads = 4, .kv_heads = 2, .intermediate = 64, .vocab = kVocab, .norm_eps = 1e-6};
  LlamaOptions scaled = plain, mistral = plain, qwen2 = plain, qwen3 = plain, mixtral = plain, qwen3_moe;
  scaled.rope_theta = 500000;
  scaled.rope_scaling = {.factor = 8, .low_turns = 1, .high_turns = 4, .positions = 1024};
  mistral.window = 4096;
  mistral.head_size = 16;
  qwen2.qkv_bias = qwen2.tied = true;
  qwen2.rope_theta = 1e6;
  qwen3.qk_norm = qwen3.tied = true;
  qwen3.head_size = 16;
  mixtral.router = {.experts = 6, .experts_per_token = 2};
  mixtral.expert_intermediate = 32;
  qwen3_moe = mixtral;
  qwen3_moe.qk_norm = true;
  qwen3_moe.router.normalized = false;
  return {{"llama", "llama", plain},
          {"llama3", "llama", scaled},
          {"mistral", "mistral", mistral},
          {"qwen2", "qwen2", qwen2},
          {"qwen3", "qwen3", qwen3},
          {"mixtral", "mixtral", mixtral},
          {"qwen3_moe", "qwen3_moe", qwen3_moe}};
}

struct Result {
  double loss = 0;  // the mean over tokens
  at::Tensor gradients;
};

at::Tensor numbers(int64_t length, int64_t seed, int64_t shift) {
  return (at::arange(length + 1, at::kLong) * 7 + seed * 13).square().remainder(kVocab).narrow(0, shift, length).view({1, -1});
}

double mean_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.to(at::kDouble).flatten(0, 1), targets.flatten()).item<double>();
}

golden::Named distinct(const torch::nn::Module& module, bool gradients) {
  golden::Named named;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      named.emplace_back(item.key(), gradients ? item.value().grad() : item.value().detach().to(at::kFloat, false, true));
  return named;
}

at::Tensor in_one(const golden::Named& named) {
  std::vector<at::Tensor> all;
  for (const auto& [name, value] : named) all.push_back(value.to(at::kDouble).flatten());
  return at::cat(all);
}

// Values that both dtypes hold exactly, so that no rounding of weights is counted.
template <class Model>
Model made(Model model, int64_t seed) {
  const Initializer normal = normal_initializer(static_cast<uint64_t>(seed), 0.3);
  initialize_parameters(*model, [&](const std::string& name, const Shape& shape, Interval run, at::Tensor values) {
    normal(name, {shape.empty() ? 1 : shape[0], numel(shape)}, run, values);
    if (shape.size() < 2 && name.ends_with("weight")) values.add_(1);
    values.copy_(values.to(at::kBFloat16).to(at::kHalf));
  });
  return model;
}

template <class Model>
Result ours(Model model, at::ScalarType dtype, const at::Tensor& tokens, const at::Tensor& targets) {
  model->to(dtype);
  const at::Tensor logits = call(model, tokens), wide = dtype == at::kDouble ? logits : logits.to(at::kFloat);
  at::cross_entropy_loss(wide.flatten(0, 1), targets.flatten(), {}, at::Reduction::Sum).backward();
  return {mean_loss(logits.detach(), targets), in_one(distinct(*model, true))};
}

Result theirs(golden::PeerRun peer, at::ScalarType dtype) {
  peer.dtype = dtype;
  const golden::PeerResult result = golden::run_in_transformers(peer);
  return {mean_loss(result.logits, peer.targets), in_one(result.gradients)};
}

// Sums over seeds of squares: of the loss, and of the gradient as a part of its norm.
struct Distance {
  double loss = 0, gradients = 0;
  void add(const Result& found, const Result& truth) {
    loss += std::pow(found.loss - truth.loss, 2);
    gradients += ((found.gradients - truth.gradients).norm() / truth.gradients.norm()).square().item<double>();
  }
};

template <class Model, class Options>
void expect_no_coarser(const Kind& kind, const Options& options, at::ScalarType dtype, int64_t length) {
  Distance own, peers;
  for (int64_t seed = 0; seed < kSeeds; ++seed) {
    const at::Tensor tokens = numbers(length, seed, 0), targets = numbers(length, seed, 1);
    const golden::PeerRun peer{.config = checkpoint::hugging_face_config({kind.family, options, 4096}),
                               .parameters = distinct(*made(Model(options), seed), false),
                               .tokens = tokens,
                               .targets = targets};
    own.add(ours(made(Model(options), seed), dtype, tokens, targets),
            ours(made(Model(options), seed), at::kDouble, tokens, targets));
    peers.add(theirs(peer, dtype), theirs(peer, at::kDouble));
  }
  const double loss = std::sqrt(own.loss / peers.loss), gradients = std::sqrt(own.gradients / peers.gradients);
  const std::string where = fmt::format("{} in {} at {} tokens: loss {:.2f} (theirs {:.1e}), gradients {:.2f} (theirs {:.1e})",
                                        kind.name, dtype_name(dtype), length, loss, std::sqrt(peers.loss / kSeeds), gradients,
                                        std::sqrt(peers.gradients / kSeeds));
  fmt::print("{}\n", where);
  EXPECT_LE(loss, kRatio) << where;
  EXPECT_LE(gradients, kRatio) << where;
}

// Nightly runs ask for other numbers of tokens: those of all lengths take minutes.
std::vector<int64_t> lengths() {
  const char* asked = std::getenv("SHARDPROOF_TOKENS");
  std::istringstream words(asked ? asked : "16 256");
  return {std::istream_iterator<int64_t>(words), {}};
}

}  // namespace

TEST(TransformersPrecision, losses_and_gradients_are_as_exact_as_those_of_the_package) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf})
    for (const int64_t length : lengths()) {
      for (const Kind& kind : kinds()) expect_no_coarser<Llama>(kind, kind.options, dtype, length);
      const GptOptions gpt{.layers = 2, .hidden = 48, .heads = 4, .vocab = kVocab, .positions = 4096, .tanh_gelu = true};
      expect_no_coarser<Gpt>({"gpt2", "gpt2", {}}, gpt, dtype, length);
    }
}

// Squares of these are beyond float16, as activations of real models are.
TEST(TransformersPrecision, a_norm_holds_what_float16_holds_and_not_its_square) {
  RmsNorm norm(8, 1e-6);
  norm->to(at::kHalf);
  const at::Tensor x = (at::arange(16, at::kFloat) * 400 - 3000).view({2, 8}).to(at::kHalf).requires_grad_();
  const at::Tensor y = norm(x), wide = x.detach().to(at::kDouble).requires_grad_();
  const at::Tensor truth = at::rms_norm(wide, {8}, {}, 1e-6);
  y.to(at::kFloat).square().sum().backward();
  truth.pow(3).sum().backward();
  EXPECT_TRUE(at::allclose(y.detach().to(at::kDouble), truth.detach(), 2e-3, 0));
  EXPECT_TRUE(at::isfinite(x.grad()).all().item<bool>());
}
