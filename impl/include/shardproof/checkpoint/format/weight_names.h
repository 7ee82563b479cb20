// What the files of model families call weights, and how they lay them out. The families are those of Hugging Face's
// transformers package: gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, dots1, glm4_moe and deepseek_v3. The family ""
// stands for a model whose own names the file has. This header does not include Torch.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "shardproof/algebra/box.h"

namespace shardproof::checkpoint {

const std::vector<std::string>& weight_families();
// Throws Error, which lists the known ones, unless the family is one of them.
void require_family(const std::string& family);

// Whether queries, keys and values are one tensor, and likewise the gate and the up projection of a gated MLP. Their rows then
// follow each other: "self_attn.qkv_proj.weight" has those of q_proj, k_proj and v_proj, "mlp.gate_up_proj.weight" those of
// gate_proj and up_proj. GPT-2's "attn.c_attn" is fused in its own files; separate its parts are "attn.{q,k,v}_proj", and
// outputs x inputs.
//
// Experts are stacks of matrices in the model, "mlp.experts.gate_up_proj" and "mlp.experts.down_proj". Files of families
// with experts have a tensor for each matrix of each expert, by the expert's number. `fused` ones have the stacks.
enum class Projections { as_family, fused, separate };

struct WeightPart {
  std::string name;
  std::optional<Interval> rows = {};   // along dim 0; nothing: the whole tensor
  std::optional<int64_t> matrix = {};  // of a stack [matrices, rows, columns]: which one, whose rows they are

  Shape shape(Shape of_tensor) const;
};
// How a tensor is made of others: their rows, end to end. `turned`: the tensor in the file is inputs x outputs, as GPT-2's
// projections are, and the model's outputs x inputs. Rows are counted in the model's orientation. With `matrices` the rows are
// those of a stack of so many, and all parts have the same shape.
struct WeightRecipe {
  std::vector<WeightPart> parts;
  bool turned = false;
  int64_t matrices = 0;
};
using WeightShapes = std::map<std::string, Shape>;

// How the parameter is made of the tensors of a file, fused or separate there; nothing when the file lacks it. The file may be
// that of a base model, without the head and the base's prefix. Throws Error, which names the tensor, when a fused one has not
// the rows of its parts, or when one expert is there and another is not.
std::optional<WeightRecipe> parameter_recipe(const std::string& family, const std::string& parameter,
                                             const WeightShapes& parameters, const WeightShapes& stored);
// The tensors of a file, by their names there, as made of the model's parameters. Throws Error when projections cannot be as
// they should.
std::map<std::string, WeightRecipe> file_recipes(const std::string& family, const WeightShapes& parameters,
                                                 Projections projections = Projections::as_family);
// Whether the name is that of a bias of a router (RouterOptions::bias), a buffer that files have, too. It stays in float32, as
// in the package: in smaller dtypes it would choose other experts.
bool is_router_bias(const std::string& name);
// Of a file whose model is not known: each tensor that is a parameter, as it is. Throws Error when that would be an expert.
std::map<std::string, WeightRecipe> renamed_parameters(const std::string& family, const WeightShapes& stored);
// Whether files of the family may have layers behind the model's own that draft further tokens.
bool has_drafts(const std::string& family);
// Whether a tensor of a file is no parameter: the masks of old GPT-2 files, frequencies of rotary positions, and the `drafts`
// layers behind the model's own that draft further tokens.
bool is_no_weight(const std::string& family, const std::string& stored, const WeightShapes& parameters, int64_t drafts = 0);

}  // namespace shardproof::checkpoint
