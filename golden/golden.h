// The unsharded reference: one process, one thread, plain LibTorch, nothing of `impl`. It is told what to train, on which
// data, and in which order the case's mode sums gradients; it never sees the code under test.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace golden {

// Named tensors in a fixed order.
using Named = std::vector<std::pair<std::string, at::Tensor>>;

enum class Activation { identity, relu, tanh, gelu };  // gelu is the erf form

// MLP: linear layers widths[i] -> widths[i + 1] with the activation between them (none after the last). Parameters
// "layers.<i>.weight" [out, in] and, with `bias`, "layers.<i>.bias" [out]. Input [B, widths.front()], target
// [B, widths.back()]; loss = sum((output - target)^2).
struct Mlp {
  std::vector<int64_t> widths;
  Activation activation = Activation::tanh;
  bool bias = true;
};

// GPT-2 style, pre-norm, no dropout; layer norm eps 1e-5, gelu of the erf form, causal attention with scale
// 1/sqrt(hidden / heads). Input and target [B, T] int64, T <= positions; loss = sum over tokens of the cross entropy.
// Parameters, in this order: "wte.weight" [vocab, hidden], "wpe.weight" [positions, hidden], per layer
// "h.<i>.ln_1.{weight,bias}", "h.<i>.attn.c_attn.{weight,bias}" [3 * hidden, hidden], "h.<i>.attn.c_proj.{weight,bias}",
// "h.<i>.ln_2.{weight,bias}", "h.<i>.mlp.c_fc.{weight,bias}" [4 * hidden, hidden], "h.<i>.mlp.c_proj.{weight,bias}",
// then "ln_f.{weight,bias}" and, unless tied, "lm_head.weight" [vocab, hidden] (tied: wte.weight is the head).
struct Gpt {
  int64_t layers = 1;
  int64_t hidden = 8;
  int64_t heads = 1;
  int64_t vocab = 16;
  int64_t positions = 8;
  bool tied = false;
};

struct Model {
  enum class Kind { mlp, gpt } kind = Kind::mlp;
  Mlp mlp;
  Gpt gpt;
};

// The names and shapes of a model's parameters, in the order above.
std::vector<std::pair<std::string, std::vector<int64_t>>> parameter_shapes(const Model& model);

// Elementwise, one IEEE operation at a time, scalars computed in double and rounded once to the dtype:
//   sgd    g += weight_decay * p (if not 0);  m = momentum * m + g (if momentum is not 0), d = m or g;  p -= lr * d
//   adamw  p *= 1 - lr * weight_decay;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * (g * g);
//          p -= (lr / (1 - beta1^t)) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))
// State starts at zero and is called "momentum_buffer", "exp_avg", "exp_avg_sq".
struct Optimizer {
  enum class Kind { sgd, adamw } kind = Kind::sgd;
  double lr = 0.1;
  double momentum = 0;
  double weight_decay = 0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
};

// Gradients of the microbatches (round k, rank i) are added in one of two orders:
//   rounds_then_ranks  each rank's rounds first, g[0][i] + g[1][i] + ..., then the ranks in order
//   ranks_then_rounds  the ranks of each round in order, then the rounds
enum class SumOrder { rounds_then_ranks, ranks_then_rounds };

// loss of a microbatch = weight * the model's loss. Gradients are those of that.
struct Microbatch {
  at::Tensor input;
  at::Tensor target;
  double weight = 1;
};

struct Step {
  std::vector<std::vector<Microbatch>> microbatches;  // [round][rank], at least one of each, none of them empty
  double divide = 1;      // the summed gradient is divided by this, a true division (no operation when 1)
  double clip_norm = 0;   // 0: the norm is measured, nothing is clipped
};

struct Run {
  Model model;
  Optimizer optimizer;
  Named parameters;  // initial values, float32, as `parameter_shapes` says
  std::vector<Step> steps;
  SumOrder order = SumOrder::rounds_then_ranks;
};

// What one step left behind.
struct StepTrace {
  std::vector<std::vector<double>> losses;  // [round][rank], the weighted loss
  double gradient_norm = 0;  // of the divided gradients, before clipping: the exact sum of squares rounded once to
                             // double, then its square root
  Named gradients;           // divided and clipped, as the optimizer reads them. Clipping multiplies by
                             // clip_norm / (gradient_norm + 1e-6), rounded to the dtype, when that is below 1
  Named parameters;          // after the update
  std::vector<std::pair<std::string, Named>> state;  // after the update: {"exp_avg", {{"wte.weight", ...}, ...}}, ...
};
using Trace = std::vector<StepTrace>;

// Trains with C++ LibTorch in the dtype given (at::kFloat, or at::kDouble as the truth for tolerances: every parameter
// and floating input is converted, data is not redrawn). Each microbatch is a forward and backward of its own.
// Bits depend on the number of threads, so at::get_num_threads() must be 1: call at::set_num_threads(1) when the process
// starts. Throws std::invalid_argument on that and on a run that makes no sense. Numbers that overflow or are NaN are
// carried on, not refused.
Trace train(const Run& run, at::ScalarType dtype = at::kFloat);

// The same run by PyTorch in embedded Python, with its own model definitions, its own losses, torch.optim and
// torch.nn.utils.clip_grad_norm_, in float64. Slow to start (imports torch once a process); calls are serialised.
// Throws EnvironmentError when Python or torch cannot be loaded, saying what to install.
Trace train_in_python(const Run& run);

class EnvironmentError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace golden
