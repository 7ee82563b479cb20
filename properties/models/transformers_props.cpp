// The library's language models beside those of the transformers package, on the same random weights.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "golden/hugging_face.h"
#include "shardproof/shardproof.h"

using namespace shardproof;

namespace {

constexpr int64_t kVocab = 13;

struct Result {
  at::Tensor logits;
  golden::Named gradients;
};

golden::Named distinct(const torch::nn::Module& module, bool gradients) {
  golden::Named named;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      named.emplace_back(item.key(), (gradients ? item.value().grad() : item.value().detach()).clone());
  return named;
}

// Vectors as well: a bias of zero would prove nothing.
void randomize(torch::nn::Module& module) {
  const Initializer normal = normal_initializer(11, 0.5);
  initialize_parameters(module, [&](const std::string& name, const Shape& shape, Interval run, at::Tensor values) {
    normal(name, {shape.empty() ? 1 : shape[0], numel(shape)}, run, values);
    if (shape.size() < 2 && name.ends_with("weight")) values.mul_(0.5).add_(1);
  });
}

at::Tensor tokens() { return (at::arange(3 * 9, at::kLong) * 5 + 2).remainder(kVocab).view({3, 9}); }
at::Tensor targets() { return (at::arange(3 * 9, at::kLong) * 7 + 1).remainder(kVocab).view({3, 9}); }

template <class Model>
Result run_ours(Model model, at::ScalarType dtype) {
  model->to(dtype);
  const at::Tensor logits = call(model, tokens());
  at::cross_entropy_loss(logits.flatten(0, 1), targets().flatten()).backward();
  return {logits.detach(), distinct(*model, /*gradients=*/true)};
}

// The largest difference in any tensor, as a part of that tensor's largest magnitude.
double apart(const Result& a, const Result& b) {
  const auto distance = [](const at::Tensor& x, const at::Tensor& y) {
    return (x.to(at::kDouble) - y.to(at::kDouble)).abs().max().item<double>() / y.abs().max().item<double>();
  };
  double most = distance(a.logits, b.logits);
  EXPECT_EQ(a.gradients.size(), b.gradients.size());
  for (size_t i = 0; i < b.gradients.size(); ++i) {
    EXPECT_EQ(a.gradients[i].first, b.gradients[i].first);
    most = std::max(most, distance(a.gradients[i].second, b.gradients[i].second));
  }
  return most;
}

// Two right programs differ by roundings. Theirs are as many as ours, so the distance of our float32 run from our float64 run
// tells how far theirs may be from that, give or take another order of sums.
constexpr double kSpread = 16;

double distance_of_peer(const golden::PeerRun& peer, const Result& ours) {
  const golden::PeerResult result = golden::run_in_transformers(peer);
  return apart({result.logits, result.gradients}, ours);
}

golden::PeerRun gpt2(const GptOptions& o, golden::Named parameters) {
  return {.family = "gpt2",
          .sizes = {{"vocab_size", o.vocab},
                    {"n_positions", o.positions},
                    {"n_embd", o.hidden},
                    {"n_layer", o.layers},
                    {"n_head", o.heads}},
          .numbers = {{"layer_norm_epsilon", 1e-5}},
          .words = {{"activation_function", "gelu"}},
          .tied = o.tied,
          .parameters = std::move(parameters),
          .tokens = tokens(),
          .targets = targets()};
}

golden::PeerRun llama(const LlamaOptions& o, golden::Named parameters) {
  return {.family = "llama",
          .sizes = {{"vocab_size", o.vocab},
                    {"hidden_size", o.hidden},
                    {"intermediate_size", o.intermediate},
                    {"num_hidden_layers", o.layers},
                    {"num_attention_heads", o.heads},
                    {"num_key_value_heads", o.kv_heads},
                    {"max_position_embeddings", 32}},
          .numbers = {{"rms_norm_eps", o.norm_eps}},
          .words = {},
          .tied = o.tied,
          .parameters = std::move(parameters),
          .tokens = tokens(),
          .targets = targets()};
}

}  // namespace

// In float64 both, where a hundred roundings are far below 1e-12. Parameters of other names are refused.
TEST(Transformers, a_gpt_has_the_names_logits_and_gradients_of_gpt2) {
  for (const bool tied : {true, false}) {
    const GptOptions options{.layers = 2, .hidden = 12, .heads = 3, .vocab = kVocab, .positions = 10, .tied = tied};
    Gpt model(options);
    randomize(*model);
    const Result ours = run_ours(model, at::kDouble);
    golden::PeerRun peer = gpt2(options, distinct(*model, false));
    peer.dtype = at::kDouble;
    EXPECT_LT(distance_of_peer(peer, ours), 1e-12);
    peer.numbers["layer_norm_epsilon"] *= 1.01;
    EXPECT_GT(distance_of_peer(peer, ours), 1e-9) << "a comparison without teeth";
    peer.parameters[0].first = "wte.weights";
    EXPECT_THROW(golden::run_in_transformers(peer), std::runtime_error);
  }
}

// The package computes norms and angles of its Llama in float32, whatever the model's dtype.
TEST(Transformers, a_llama_has_the_names_logits_and_gradients_of_llama) {
  for (const bool tied : {true, false})
    for (const int64_t kv_heads : {6, 2, 1}) {
      const LlamaOptions options{.layers = 2,
                                 .hidden = 24,
                                 .heads = 6,
                                 .kv_heads = kv_heads,
                                 .intermediate = 10,
                                 .vocab = kVocab,
                                 .tied = tied};
      Llama single(options), twice(options);
      randomize(*single);
      randomize(*twice);
      const golden::Named parameters = distinct(*single, false);
      const Result ours = run_ours(twice, at::kDouble);
      const double bound = kSpread * apart(run_ours(single, at::kFloat), ours);
      EXPECT_LT(bound, 1e-3);
      EXPECT_LT(distance_of_peer(llama(options, parameters), ours), bound);
      golden::PeerRun other = llama(options, parameters);
      other.numbers["rms_norm_eps"] *= 100;
      EXPECT_GT(distance_of_peer(other, ours), bound) << "a comparison without teeth";
    }
}

