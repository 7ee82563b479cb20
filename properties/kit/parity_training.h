// Trains a model sharded and beside it, step by step, plainly: whole, unsharded, on the data of all ranks.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "properties/kit/toy_modules.h"
#include "shardproof/shardproof.h"

namespace parity {

using shardproof::MeshComm;
using shardproof::Sharded;
using Tensors = std::map<std::string, at::Tensor>;

inline shardproof::Mesh ranks(int64_t world) { return shardproof::Mesh({{"dp_shard", world}}); }
inline shardproof::Mesh grid(int64_t replicas, int64_t shards) {
  return shardproof::Mesh({{"dp_replicate", replicas}, {"dp_shard", shards}});
}

// toy::options in this precision, for models that have the same values on every rank from the start.
inline shardproof::ShardOptions with(const std::string& strategy, const shardproof::Precision& precision) {
  shardproof::ShardOptions options = toy::options(strategy);
  options.precision = precision;
  options.broadcast_initial_values = false;
  return options;
}

// A model and its loss on the data that `salt` stands for. Made anew for every run, with the same values every time.
struct Trainee {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(int64_t salt)> loss;
};
using MakeTrainee = std::function<Trainee()>;

// Of a module whose forward takes one tensor; the loss is the sum of squares of the output, over data of these sizes.
template <class Holder>
Trainee trainee(Holder model, std::vector<int64_t> sizes) {
  return {model.ptr(),
          [model, sizes](int64_t salt) mutable { return shardproof::call(model, toy::data(sizes, salt)).square().sum(); }};
}

// One Linear registered as "a" and "b" and run twice, another as "c"; the loss is computed outside of any module's forward.
Trainee registered_twice();

struct Plan {
  shardproof::Mesh mesh{{{"dp_shard", 2}}};
  shardproof::ShardOptions options;
  int64_t steps = 2;
  int64_t microbatches = 1;
  bool unsynced = false;  // all but the last microbatch under NoSync, besides
  bool meta = false;      // the sharded model is built without memory
  double tolerance = 0;   // relative to the largest element; 0: every bit
  shardproof::ThreadsOptions threads = {};
  std::function<Sharded(const Trainee&, std::shared_ptr<MeshComm>)> shard = {};  // empty: fully_shard with the options
  std::function<void(Sharded&)> on_start = {};
  std::function<void(Sharded&, torch::nn::Module&, int64_t step)> on_step = {};  // before its first forward
  std::function<void(const torch::nn::Module&)> on_plain_step = {};              // the same to the plain model
};

// In every step: gradients are those of plain autograd on the same parameters, summed over microbatches and ranks in the
// strategy's order and divided by the ranks; and the optimizer (SGD with momentum) changes parameters as the formula says.
void expect_trains_like_plain(const MakeTrainee& make, const Plan& plan);

// The sum over microbatches and ranks in the order of the strategy, divided by the number of ranks. `terms[rank][microbatch]`.
at::Tensor combine(const std::vector<std::vector<at::Tensor>>& terms, const shardproof::Mesh& mesh,
                   const shardproof::Strategy& row);

// Gradients of one backward of the plain model, by first name; zeros where autograd gives none.
Tensors plain_gradients(const Trainee& plain, int64_t salt);
void load(torch::nn::Module& module, const std::vector<std::pair<std::string, at::Tensor>>& values);

// What all ranks' pieces of these parameters make up, on every rank, in the dtype of the pieces. Collective over the mesh.
Tensors whole(const std::vector<shardproof::Piece>& pieces, const Tensors& like, MeshComm& comms);

void expect_near(const at::Tensor& actual, const at::Tensor& wanted, double tolerance, const std::string& what);

void on_mesh(const shardproof::Mesh& mesh, const std::function<void(std::shared_ptr<MeshComm>)>& body,
             const shardproof::ThreadsOptions& threads = {}, std::shared_ptr<shardproof::Trace> trace = {});

// Calls by name since the trace's first `from` records.
std::map<std::string, int64_t> calls_of(const shardproof::Trace& trace, int64_t rank, size_t from = 0);

using toy::has_memory;

}  // namespace parity
