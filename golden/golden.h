// The unsharded reference: one process, one thread, plain LibTorch, nothing of `impl`. It is told what to train, on which
// data, and in which order the case's mode sums gradients; it never sees the code under test.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
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

// GPT-2 style, pre-norm; layer norm eps 1e-5, gelu of the erf form or, with `tanh_gelu`, of the tanh form (which canonical
// arithmetic has not), causal attention with scale 1/sqrt(hidden / heads). Input and target [B, T] int64, T <= positions; loss
// = sum over tokens of the cross entropy. Parameters, in this order: "wte.weight" [vocab, hidden], "wpe.weight" [positions,
// hidden], per layer "h.<i>.ln_1.{weight,bias}", "h.<i>.attn.c_attn.{weight,bias}" [3 * hidden, hidden],
// "h.<i>.attn.c_proj.{weight,bias}", "h.<i>.ln_2.{weight,bias}", "h.<i>.mlp.c_fc.{weight,bias}" [4 * hidden, hidden],
// "h.<i>.mlp.c_proj.{weight,bias}", then "ln_f.{weight,bias}" and, unless tied, "lm_head.weight" [vocab, hidden] (tied:
// wte.weight is the head). Dropout (dropout.h): of the sum of the embeddings, then per layer of attention's probabilities [B,
// heads, T, T], of what attn.c_proj gives and of what mlp.c_proj gives. With it attention is softmax(q / sqrt(head) k^T,
// masked) in single steps.
struct Gpt {
  int64_t layers = 1;
  int64_t hidden = 8;
  int64_t heads = 1;
  int64_t vocab = 16;
  int64_t positions = 8;
  bool tied = false;
  double dropout = 0;
  bool tanh_gelu = false;
};

// Llama style, pre-norm: RMS norm (x * rsqrt(mean(x^2) + eps) * weight), rotary positions (element i of a head turns with
// element i + head / 2 by position / theta^(2i / head), in float32 or canonical), grouped queries (a key head serves heads /
// kv_heads neighbouring query heads), gated MLP down(silu(gate(x)) * up(x)). Where rope_factor is not 1, turns are slowed down
// as in Llama 3.1, or with rope_yarn as in DeepSeek-V3 (rope.h). With rotary_size only the first so many features of a head
// turn, as a head of that size. Data and loss are the GPT's; `positions` is the longest sequence. A head has `head_size`
// features, or hidden / heads where that is 0. With `qkv_bias` the projections of queries, keys and values have biases. With
// `qk_norm` there is an RMS norm over the features of each head's queries, and one of its keys, before they turn. Query i sees
// key j <= i where no token document_end lies at positions j to i - 1 and, with a window, in layers from number full_layers on,
// j > i - window. Parameters, in this order: "model.embed_tokens.weight" [vocab, hidden], per layer
// "model.layers.<i>.self_attn.{q,k,v,o}_proj.weight", with qkv_bias each of the first three followed by its "bias", with
// qk_norm "model.layers.<i>.self_attn.{q,k}_norm.weight" [head], "model.layers.<i>.mlp.{gate,up,down}_proj.weight",
// "model.layers.<i>.{input,post_attention}_layernorm.weight", then "model.norm.weight" and, unless tied, "lm_head.weight".
// Dropout: per layer, of attention's probabilities.
//
// With `kv_rank`, attention is the latent one of DeepSeek-V3, and of a layer's x:
//   q = linear(x, q_proj), or with query_rank linear(norm(linear(x, q_a_proj)), q_b_proj); per head `head` features
//   latent, shared = the first kv_rank and the last rotary_size columns of linear(x, kv_a_proj_with_mqa)
//   linear(norm(latent), kv_b_proj) has per head the first head - rotary_size features of a key, then value_size of a value
//   A key ends with the turned `shared`, and the last rotary_size features of a query turn. With `interleaved` elements 2i and
//   2i + 1 turn together, and are then elements i and i + rotary_size / 2. Norms are RMS norms with the eps 1e-6.
// With rope_yarn queries that have turned are multiplied by (1 + rope_mscale / 10 * log(rope_factor))^2, a number of double.
// Parameters, in place of the four projections, of "self_attn.": "q_proj.weight" [heads * head, hidden] or "q_a_proj.weight"
// [query_rank, hidden], "q_a_layernorm.weight" and "q_b_proj.weight", then "kv_a_proj_with_mqa.weight" [kv_rank + rotary_size,
// hidden], "kv_a_layernorm.weight", "kv_b_proj.weight" [heads * (head - rotary_size + value_size), kv_rank] and "o_proj.weight"
// [hidden, heads * value_size].
//
// With `experts`, layers from number dense_layers on have experts in place of the gated MLP. Of its tokens x [N, hidden]:
//   logits = linear(x, gate), in float32 or wider, for sigmoid those of x and gate in float32 or wider;
//   scores = softmax(logits) or sigmoid(logits), or the logits (chosen_softmax).
//   Of expert_groups > 1 groups of neighbouring experts only those groups_per_token take part whose two highest scores have the
//   highest sum (equal ones: the first). A token's experts e_0, e_1, .. are the experts_per_token with the highest scores,
//   falling (equal ones: the first). Weights w_j are their scores; with `normalized` divided by their sum (sigmoid: the sum +
//   1e-20); of chosen_softmax they are softmax(chosen logits); all times expert_scale; rounded to x's dtype.
//   y = sum over j, in this order, of w_j * down_e(silu(gate_e(x)) * up_e(x)); plus the shared gated MLP of x, if there is one.
// What keeps experts busy, where these are not 0. Losses are sums over tokens, in the logits' width, and belong to a training
// loss before its weight, layer by layer, balance first:
//   expert_balance: for each sequence of T tokens the sum over its tokens and the experts e of p_e * f_e. f_e = c_e / T *
//     (expert_balance * experts / experts_per_token), in double and rounded to the logits' width, where c_e, a constant, is how
//     many of its tokens chose e, and p is softmax(logits), or sigmoid(logits) / (their sum + 1e-20). Of balance_over step c_e
//     and T are those of the training forwards of all ranks, and a step has one round;
//   expert_z: sum over tokens of log(sum over e of exp(logits_e))^2 * expert_z;
//     With canonical arithmetic sums over e go by index; what is rounded are the logits, each token's term of a loss, and the
//     gradient that the logits get from both losses together;
//   expert_bias: scores get a bias before experts and groups are chosen, and weights do not. It is the buffer
//     "mlp.gate.e_score_correction_bias" [experts], which begins as expert_lean * (e % 3 - 1), rounded to float32, and is there
//     where expert_lean alone is not 0 too. After each step that is not skipped it goes up by expert_bias where the step's
//     training forwards chose the expert less often than the mean, and down where more often;
//   expert_capacity: of a sequence of T tokens at most ceil(expert_capacity * (T * experts_per_token / experts)) choose an
//     expert, and at least one. Of more, the terms with the highest w_j stay, and of equal ones those of the first tokens; w_j
//     is compared before it is rounded. The others leave y. Losses and the bias count them all the same.
// An expert's rows are multiplied together, in the order of tokens. Parameters of such a layer, in place of the MLP's three:
// "mlp.gate.weight" [experts, hidden], "mlp.experts.gate_up_proj" [experts, 2 * expert_width, hidden] (first the gate's rows),
// "mlp.experts.down_proj" [experts, hidden, expert_width], and "mlp.shared_experts.{gate,up,down}_proj.weight".
struct Llama {
  int64_t layers = 1;
  int64_t hidden = 8;  // a multiple of heads, by an even number unless head_size is given
  int64_t heads = 2;   // a multiple of kv_heads
  int64_t kv_heads = 1;
  int64_t intermediate = 12;
  int64_t vocab = 16;
  int64_t positions = 8;
  bool tied = false;
  double dropout = 0;
  bool qk_norm = false;
  bool qkv_bias = false;
  int64_t head_size = 0;  // even
  double theta = 10000;
  double eps = 1e-5;
  double rope_factor = 1, rope_low = 1, rope_high = 4;
  int64_t rope_positions = 8192;
  bool rope_yarn = false;
  double rope_mscale = 0;   // of latent attention with rope_yarn
  int64_t rotary_size = 0;  // even; 0: all features of a head turn
  // Latent attention (see above); 0: there is none. It has as many kv_heads as heads, and a rotary_size below head.
  int64_t kv_rank = 0;
  int64_t query_rank = 0;
  int64_t value_size = 0;  // 0: head
  bool interleaved = false;
  int64_t window = 0;         // 0: a query sees all keys up to its own
  int64_t full_layers = 0;    // the first so many layers have no window
  int64_t document_end = -1;  // -1: no token ends a document
  // Experts (see above); 0: there are none.
  int64_t experts = 0;
  int64_t experts_per_token = 1;
  int64_t expert_width = 4;
  int64_t shared_width = 0;  // 0: there is no shared MLP
  int64_t dense_layers = 0;  // the first so many layers have no experts
  enum class Score { softmax, chosen_softmax, sigmoid } score = Score::softmax;
  bool normalized = true;
  double expert_scale = 1;
  int64_t expert_groups = 1, groups_per_token = 1;
  double expert_balance = 0, expert_z = 0, expert_bias = 0, expert_capacity = 0;
  enum class BalanceOver { sequence, step } balance_over = BalanceOver::sequence;
  double expert_lean = 0;

  int64_t head() const { return head_size > 0 ? head_size : hidden / heads; }
  int64_t turning() const { return rotary_size > 0 ? rotary_size : head(); }
  int64_t values() const { return value_size > 0 ? value_size : head(); }
  bool has_bias() const { return expert_bias != 0 || expert_lean != 0; }
};

// Convolutions: input [B, channels.front(), size, size]; layer i is a 2-d convolution channels[i] -> channels[i + 1] with an
// odd square kernel, padding kernel / 2, then, if `norm`, a group norm with one group (eps 1e-5, over channels, height and
// width) or, with `batch`, a batch norm (eps 1e-5, momentum 0.1; size >= 2), then relu; after the last one the mean over height
// and width and a linear head to `classes`. Target [B, classes]; loss = sum((output - target)^2). Parameters "conv.<i>.weight"
// [out, in, k, k], "conv.<i>.bias", "norm.<i>.weight", "norm.<i>.bias" (if norm), "head.weight", "head.bias". A batch norm has
// the buffers "norm.<i>.running_mean" and "norm.<i>.running_var" of each rank's own, which begin as 0 and 1.
struct Conv {
  std::vector<int64_t> channels;
  int64_t kernel = 3;
  int64_t size = 4;
  int64_t classes = 3;
  bool norm = true;
  bool batch = false;
};

// A mixture of what real models hide: input and target [B, width]; loss = sum((output - target)^2). In order:
//   x = input * buffer                   "scales" [width], a buffer, not a parameter: scales[i] = 1 + i / 8
//   x = tanh(linear(x, shared.weight, shared.bias))        the same module called `calls` times in a row (1 to 3)
//   x = x * gain                         parameter "gain", 0-dim
//   x = x + einsum over "cube" [2, width, 1] : x * (cube[0] + cube[1]).squeeze(-1)       an n-dim parameter
//   "empty" [0, width]                   a parameter of no elements; x = x + empty.sum(0)
//   x = x + linear(x, side.weight)       "side.weight" [width, width], only where the microbatch says so (Microbatch::branch):
//                                        unused on some ranks, or on all
//   "never" [width]                      a parameter that nothing uses
//   x = linear(tanh(x), shared.weight)   the weight again, under the second name "out.weight" in the library's model
// Parameters, in this order: "shared.weight" [width, width], "shared.bias" [width], "gain" [], "cube", "empty", "side.weight",
// "never". Parts can be left out.
struct Odd {
  int64_t width = 3;
  int64_t calls = 1;
  bool gain = true, cube = true, empty = true, side = true, never = true, tied = true;  // tied: the last line above
};

// Adapters of low rank (LoRA) beside linear layers of an mlp, a gpt or a llama. A layer W of theirs gives
//   linear(v, W, bias) + linear(linear(d, A), B) * (alpha / rank),  where v is x.view_as(x)
// and d is v after dropout, a site in the order of the layers where it is above 0. Of each layer "lora_A.weight" [rank, inputs]
// and "lora_B.weight" [outputs, rank] come after its own parameters. All others have no state, and are frozen in every step.
struct Adapters {
  int64_t rank = 1;
  double alpha = 2;
  double dropout = 0;
  std::vector<std::string> layers = {};  // their names, such as "h.0.mlp.c_fc"; none: no adapters

  double scale() const { return alpha / static_cast<double>(rank); }
};

struct Model {
  enum class Kind { mlp, gpt, conv, odd, llama } kind = Kind::mlp;
  // Not of conv or odd; with canonical sums (SumOrder): forward and backward are in float64 and every sum over products, rows,
  // keys or entries of the vocabulary is of terms rounded to the nearest multiple of 2^-40, with the last bit of the right
  // factor set; a rounded term outside [-128, 128) makes it NaN. Sums within a norm's row go by index. What is no sum is
  // rounded likewise, element by element; docs/canonical.md has the formulas. Run::precision is ignored.
  bool canonical = false;
  Mlp mlp;
  Gpt gpt;
  Conv conv;
  Odd odd;
  Llama llama;
  Adapters adapters;

  // Input and target are tokens.
  bool of_tokens() const { return kind == Kind::gpt || kind == Kind::llama; }
  int64_t vocab() const { return kind == Kind::llama ? llama.vocab : gpt.vocab; }  // of those
  int64_t positions() const { return kind == Kind::llama ? llama.positions : gpt.positions; }
  double dropout() const { return kind == Kind::llama ? llama.dropout : kind == Kind::gpt ? gpt.dropout : 0; }
};

// The names and shapes of a model's parameters, in the order above.
std::vector<std::pair<std::string, std::vector<int64_t>>> parameter_shapes(const Model& model);

// One IEEE operation at a time, scalars computed in double and rounded once to the dtype (lr below is lr * the step's factor *
// the group's factor, weight_decay is weight_decay * the group's factor):
//   sgd    g += weight_decay * p (if not 0);  m = momentum * m + g (if momentum is not 0), d = m or g;
//          with nesterov d = g + momentum * m;  p -= lr * d
//   adam   g += weight_decay * p (if not 0); then as adamw without decay
//   adamw  p *= 1 - lr * weight_decay;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * (g * g);
//          p -= (lr / (1 - beta1^t)) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))
//   lion   p *= 1 - lr * weight_decay;  u = sign(beta1 * m + (1 - beta1) * g), where the sign of a zero or NaN is itself;
//          m = beta2 * m + (1 - beta2) * g;  p -= lr * u
//   muon   of parameters with two dims, both above 0: p *= 1 - lr * weight_decay;  d = (1 - momentum) * g;
//          m = momentum * m + d;  u = d + momentum * m (nesterov);  X = u / max(||u||_F, 1e-7), transposed when it has more
//          rows than columns; five
//          times A = X X^T, B = b A + c (A A), X = a X + B X with (a, b, c) = (3.4445, -4.7750, 2.0315); back transposed;
//          p -= lr * sqrt(max(1, rows / columns)) * X.  The norm is the square root of the exact sum of squares, in float32;
//          every product is one at::mm of contiguous operands, every other operation one elementwise operation in the order
//          written.
//          Parameters of other shapes: adamw with the same lr, betas, eps and decay.
// t counts the updates of that parameter. State starts at zero and is called "momentum_buffer" (sgd, muon), "exp_avg" (adam,
// adamw, lion), "exp_avg_sq"; a parameter whose rule does not use a slot has none there.
struct Optimizer {
  enum class Kind { sgd, adam, adamw, lion, muon } kind = Kind::sgd;
  double lr = 0.1;
  double momentum = 0;
  bool nesterov = false;
  double weight_decay = 0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  // The first group whose pattern occurs in a parameter's name gives its factors; none: 1 and 1.
  struct Group {
    std::string pattern;
    double lr_factor = 1;
    double decay_factor = 1;
  };
  std::vector<Group> groups = {};
  c10::Device device{c10::kCPU};  // where muon's products are computed; all else is computed on the CPU
};

// How gradients of the microbatches (round k, rank i) are added. Ranks are numbered replica * shards + shard, where
// ranks == replicas * shards.
struct SumOrder {
  int64_t shards = 1;    // ranks of one group that is summed first
  int64_t replicas = 1;  // groups, whose sums are added afterwards
  // Rounds that end with a reduction over the shards (Step::reduce_after) add their sums round by round. When replicas come
  // last, each replica adds its own sums over the rounds, and the replicas are added once at the end; else they are added after
  // each reduction.
  bool replicas_last = true;
  // Order does not matter: each microbatch's float32 gradient g becomes the integer round_to_nearest_even(g * 2^44), integers
  // are added, and the sum is rounded once to float32 (int64 -> float32, then * 2^-44). A term of 2^18 or more, or NaN, makes
  // the sum NaN. The rest of this struct, and all of Precision but `compute`, is ignored; divide_before must be 1.
  bool canonical = false;
};

// Dtypes. at::kFloat everywhere is the plain run. Parameters and optimizer state are float32 (main); the model runs on copies
// rounded to `compute`, floating inputs are rounded to it too, and its output is converted to float32 before the loss (targets
// stay float32). The gradient of a microbatch has dtype `compute`. Local sums over rounds are taken in `gradient` (each term
// converted first); for a reduction the local sum is converted to `reduce`, summed over ranks in rank order, each addition
// rounded to `reduce` - or, with `float32_sums`, converted to float32, added there in rank order, rounded once to `reduce` -
// and the result converted to `gradient`, in which sums over reductions are taken. Each of the two reductions (over shards,
// over replicas) is so; between them the value is in `gradient`. A reduction over a group of one rank is none: nothing is
// rounded to `reduce`. The optimizer reads float32.
struct Precision {
  at::ScalarType compute = at::kFloat;
  at::ScalarType gradient = at::kFloat;
  at::ScalarType reduce = at::kFloat;
  bool float32_sums = false;
};

// loss of a microbatch = weight * the model's loss. Gradients are those of that.
struct Microbatch {
  at::Tensor input;
  at::Tensor target;
  double weight = 1;
  bool branch = true;  // Odd: whether this microbatch uses "side.weight"
  uint64_t dropout_seed = 0;  // of the masks, where the model has dropout
};

struct Step {
  std::vector<std::vector<Microbatch>> microbatches;  // [round][rank], at least one of each, none of them empty
  // First the losses of the first round, without dropout, with statistics as they are, and with the averages where there are
  // some.
  bool evaluate = false;
  bool discard = false;  // then a forward and backward of it whose gradients are forgotten
  // [round]: whether a reduction over the shards follows; the last one always does, and an empty list means only the last one.
  std::vector<bool> reduce_after = {};
  double divide_before = 1;  // each local sum is divided by this right before it is reduced over the shards (in `gradient`)
  double divide = 1;         // the summed gradient, in float32, is divided by this, a true division (no operation when 1)
  double clip_norm = 0;      // 0: the norm is measured, nothing is clipped
  double norm_order = 2;     // 1, 2 or infinity
  double lr_factor = 1;
  std::vector<std::string> frozen = {};  // names of parameters that have no gradient and are not updated in this step
  std::optional<SumOrder> order = {};    // instead of the run's
  // A load: begins where that earlier step ended, -1 being the start, instead of the one before. All ranks have the buffers
  // that rank 0 had there.
  std::optional<int64_t> after = {};
};

// Dynamic loss scaling: every loss is multiplied by the scale (after its weight), and the summed gradient divided by the scale
// after `divide`. If any element of the summed gradient is not finite, the step is skipped (nothing is updated, no t counts)
// and the scale is halved; after `growth_interval` steps in a row without that it is doubled. 0: no scaling.
struct LossScaling {
  double initial = 0;
  int64_t growth_interval = 2000;
  double minimum = 0;  // the scale is not halved below this
};

struct Run {
  Model model;
  Optimizer optimizer;
  Named parameters;  // initial values, float32, as `parameter_shapes` says
  std::vector<Step> steps;
  SumOrder order;
  Precision precision;
  LossScaling scaling;
  // Not 0: averages of the parameters are kept, which begin as the initial values. After each step that is not skipped, for
  // each parameter that is not frozen: average = average * ema + parameter * (1 - ema), one operation at a time.
  double ema = 0;
  // Not 0: half of the numbers that the model computes with, chosen by this, are one float of their dtype farther from zero or
  // nearer to it. Shows how far roundings carry. Nothing of it in float64.
  uint64_t jitter = 0;
  // Where forwards and backwards are computed; not of models with canonical arithmetic. Data and results are on the CPU, where
  // all else is computed (see Optimizer::device).
  c10::Device device{c10::kCPU};
};

// What one step left behind.
struct StepTrace {
  std::vector<std::vector<double>> losses;  // [round][rank], the weighted loss, without the loss scale
  std::vector<double> evaluated;            // [rank], likewise, where the step evaluates
  double gradient_norm = 0;  // of the divided and unscaled gradients of the parameters that are not frozen, before clipping:
                             // the exact sum of squares rounded once to double, then its square root; order 1: the exact sum of
                             // magnitudes rounded once to double; infinity: the largest magnitude
  bool skipped = false;      // by loss scaling; gradients are then empty and the norm is 0
  double loss_scale = 0;     // used in this step
  // Of the parameters that are not frozen: divided, unscaled and clipped, as the optimizer reads them. Clipping multiplies by
  // clip_norm / (gradient_norm + 1e-6), rounded to the dtype, when that is below 1.
  Named gradients;
  Named parameters;                                  // after the update, all of them
  std::vector<Named> buffers;  // [rank], of each rank's own after the step, in the order of their names
  // After the update: {"exp_avg", {{"wte.weight", ...}, ...}}, ..., and last {"ema", ...} of all parameters where averages are
  // kept.
  std::vector<std::pair<std::string, Named>> state;
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
// Throws EnvironmentError when Python or torch cannot be loaded, saying what to install, and std::invalid_argument for a run
// that the oracle does not support.
Trace train_in_python(const Run& run);

// Not averages, which it does not keep, not lion and muon, which torch.optim lacks or has otherwise, not dropout, whose masks
// are a function of its own, and not what float64 knows nothing of: other dtypes than float32 loss scaling, and steps that go
// back. Nor latent attention, rotary_size and expert_lean, for which there is run_in_transformers (hugging_face.h). Any order
// of sums is supported: none matters in float64 but for rounding.
bool oracle_supports(const Run& run);

class EnvironmentError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace golden
