#include "properties/kit/parity_training.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>

#include "properties/kit/of_set_up.h"

namespace parity {

using namespace shardproof;

namespace {

at::Tensor sum_of(const std::vector<at::Tensor>& terms) {
  at::Tensor sum = terms.at(0).clone();
  for (size_t i = 1; i < terms.size(); ++i) sum.add_(terms[i]);
  return sum;
}

int64_t salt_of(int64_t step, int64_t microbatch, int64_t rank) {
  return 1000 * step + 100 * microbatch + rank;
}

// One tensor once, under its first name.
std::vector<std::pair<std::string, at::Tensor>> distinct(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::set<c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) parameters.emplace_back(item.key(), item.value());
  return parameters;
}

Tensors combined_gradients(const Trainee& plain, const Plan& plan, int64_t step) {
  std::map<std::string, std::vector<std::vector<at::Tensor>>> terms;
  for (int64_t rank = 0; rank < plan.mesh.size(); ++rank)
    for (int64_t k = 0; k < plan.microbatches; ++k)
      for (auto& [name, gradient] : plain_gradients(plain, salt_of(step, k, rank))) {
        auto& of_parameter = terms[name];
        of_parameter.resize(plan.mesh.size());
        of_parameter[rank].push_back(gradient);
      }
  Strategy row = on_mesh(plan.options.strategy, plan.mesh);
  if (plan.unsynced) row.accumulated = row.produced;
  Tensors combined;
  for (const auto& [name, of_parameter] : terms) combined[name] = combine(of_parameter, plan.mesh, row);
  return combined;
}

// p -= lr * (momentum * m + g), each operation rounded by itself.
struct PlainSgd {
  Tensors momentum;
  void step(Tensors& parameters, const Tensors& gradients) {
    for (const auto& [name, gradient] : gradients) {
      at::Tensor& m = momentum[name];
      m = m.defined() ? m * 0.5 + gradient : gradient.clone();
      parameters.at(name).sub_(m * 0.1);
    }
  }
};

void run_microbatches(Sharded& sharded, const Trainee& own, const Plan& plan, int64_t step, int64_t rank) {
  for (int64_t k = 0; k < plan.microbatches; ++k) {
    const bool last = k + 1 == plan.microbatches;
    sharded.set_last_microbatch(last);
    sharded.set_gradient_sync(last || !plan.unsynced);
    own.loss(salt_of(step, k, rank)).backward();
  }
}

Trainee build(const MakeTrainee& make, bool meta) {
  if (!meta) return make();
  const MetaInit without_memory;
  return make();
}

// What rank 0 works out plainly for all ranks, between two barriers.
struct Wanted {
  Tensors gradients, parameters;
};

class PlainTraining {
 public:
  PlainTraining(const MakeTrainee& make, const Plan& plan) : plan_(plan), plain_(make()) {}

  Wanted step(int64_t step, const std::vector<std::pair<std::string, at::Tensor>>& before) {
    if (step == 0)
      for (const auto& [name, value] : before) expect_near(value, *plain_.module->named_parameters().find(name), 0, name);
    load(*plain_.module, before);
    if (plan_.on_plain_step) plan_.on_plain_step(*plain_.module);
    Wanted wanted;
    for (const auto& [name, tensor] : distinct(*plain_.module)) wanted.parameters[name] = tensor.detach().clone();
    wanted.gradients = combined_gradients(plain_, plan_, step);
    sgd_.step(wanted.parameters, wanted.gradients);
    return wanted;
  }

 private:
  const Plan& plan_;
  Trainee plain_;
  PlainSgd sgd_;
};

void train(const MakeTrainee& make, const Plan& plan, const std::shared_ptr<MeshComm>& comms, Wanted& shared) {
  const Trainee own = build(make, plan.meta);
  std::optional<PlainTraining> plain;
  if (comms->rank() == 0) plain.emplace(make, plan);
  Sharded sharded = plan.shard ? plan.shard(own, comms) : fully_shard(own.module, comms, plan.options);
  if (plan.on_start) plan.on_start(sharded);
  Optimizer optimizer = sgd(sharded, {.lr = 0.1, .momentum = 0.5});
  for (int64_t step = 0; step < plan.steps; ++step) {
    if (plan.on_step) plan.on_step(sharded, *own.module, step);
    const auto before = sharded.gather_parameters();
    if (plain) shared = plain->step(step, before);
    comms->world().barrier().wait();
    const Wanted wanted = shared;
    comms->world().barrier().wait();
    run_microbatches(sharded, own, plan, step, comms->rank());
    const std::string where =
        fmt::format("{} on '{}', step {}, rank {}: ", plan.options.strategy.name, plan.mesh.str(), step, comms->rank());
    for (const Piece& piece : sharded.gradients())  // each replica's own
      expect_near(piece.data, wanted.gradients.at(piece.name).flatten().narrow(0, piece.run.begin, piece.run.size()),
                  plan.tolerance, where + "gradient of " + piece.name);
    whole(sharded.gradients(), wanted.gradients, *comms);  // nothing is missing
    optimizer.step();
    for (const auto& [name, now] : sharded.gather_parameters())
      if (wanted.parameters.contains(name))
        expect_near(now, wanted.parameters.at(name), plan.tolerance, where + "updated " + name);
  }
}

}  // namespace

Trainee registered_twice() {
  auto model = std::make_shared<torch::nn::Module>("twice");
  torch::nn::Linear shared(4, 4), own(4, 4);
  model->register_module("a", shared);
  model->register_module("b", shared);
  model->register_module("c", own);
  initialize_parameters(*model, 4, 0.5);
  const auto forward = [shared = shared.ptr(), own = own.ptr()](at::Tensor x) {
    for (int64_t i = 0; i < 2; ++i) x = at::tanh(call(shared, x));
    return call(own, x).square().sum();
  };
  return {model, [model, forward](int64_t salt) { return call_as(*model, forward, toy::data({3, 4}, salt)); }};
}

void expect_trains_like_plain(const MakeTrainee& make, const Plan& plan) {
  Wanted shared;
  on_mesh(plan.mesh, [&](std::shared_ptr<MeshComm> comms) { train(make, plan, comms, shared); }, plan.threads);
}

at::Tensor combine(const std::vector<std::vector<at::Tensor>>& terms, const Mesh& mesh, const Strategy& row) {
  const bool rounds_first = accumulates_before_reducing(row);
  const auto along = [&](const char* axis) { return mesh.has(axis) ? mesh.size(axis) : 1; };
  const int64_t shards = along("dp_shard"), replicas = along("dp_replicate");
  const auto rounds = static_cast<int64_t>(terms.front().size());
  std::vector<std::vector<std::vector<at::Tensor>>> at(replicas);  // [replica][shard]
  for (int64_t rank = 0; rank < mesh.size(); ++rank) at[rank / shards].push_back(terms[rank]);
  std::vector<at::Tensor> of_replica;
  for (int64_t r = 0; r < replicas; ++r) {
    std::vector<at::Tensor> outer;
    if (rounds_first) {
      for (const auto& of_rank : at[r]) outer.push_back(sum_of(of_rank));
    } else {
      for (int64_t k = 0; k < rounds; ++k) {
        std::vector<at::Tensor> of_round;
        for (const auto& of_rank : at[r]) of_round.push_back(of_rank[k]);
        outer.push_back(sum_of(of_round));
      }
    }
    of_replica.push_back(sum_of(outer));
  }
  return sum_of(of_replica) / static_cast<double>(mesh.size());
}

Tensors plain_gradients(const Trainee& plain, int64_t salt) {
  plain.module->zero_grad();
  plain.loss(salt).backward();
  Tensors gradients;
  for (const auto& [name, parameter] : distinct(*plain.module)) {
    if (!parameter.requires_grad()) continue;
    gradients[name] = parameter.grad().defined() ? parameter.grad().clone() : at::zeros_like(parameter).detach();
  }
  return gradients;
}

void load(torch::nn::Module& module, const std::vector<std::pair<std::string, at::Tensor>>& values) {
  at::NoGradGuard no_grad;
  auto parameters = module.named_parameters();
  for (const auto& [name, value] : values)
    if (at::Tensor* parameter = parameters.find(name)) parameter->copy_(value);
}

Tensors whole(const std::vector<Piece>& pieces, const Tensors& like, MeshComm& comms) {
  // The largest of all ranks' bits, where an element that a rank does not hold is smaller than every number that can be.
  constexpr int64_t kFlip = 0x7ff8000000000001, kNone = std::numeric_limits<int64_t>::min();
  Tensors all;
  for (const auto& [name, tensor] : like) {
    at::Tensor bits = at::full({tensor.numel()}, kNone, at::kLong);
    for (const Piece& piece : pieces)
      if (piece.name == name)
        bits.narrow(0, piece.run.begin, piece.run.size()).copy_(piece.data.to(at::kDouble).view(at::kLong).bitwise_xor(kFlip));
    comms.world().all_reduce(bits, Reduce::max).wait();
    EXPECT_EQ((bits == kNone).sum().item<int64_t>(), 0) << name << ": elements that no rank holds";
    int64_t dtype_held = -1;
    for (const Piece& piece : pieces)
      if (piece.name == name) dtype_held = static_cast<int64_t>(piece.data.scalar_type());
    at::Tensor dtypes = at::full({1}, dtype_held, at::kLong);
    comms.world().all_reduce(dtypes, Reduce::max).wait();
    const int64_t agreed = dtypes.item<int64_t>();
    const auto dtype = agreed < 0 ? tensor.scalar_type() : static_cast<at::ScalarType>(agreed);
    all[name] = bits.bitwise_xor(kFlip).view(at::kDouble).to(dtype).view(tensor.sizes());
  }
  return all;
}

void expect_near(const at::Tensor& actual, const at::Tensor& wanted, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.sizes(), wanted.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), wanted.scalar_type()) << what;
  if (wanted.numel() == 0) return;
  const at::Tensor a = actual.detach().to(at::kDouble).contiguous(), w = wanted.detach().to(at::kDouble).contiguous();
  if (tolerance == 0) {
    ASSERT_TRUE(a.view(at::kLong).equal(w.view(at::kLong)))
        << what << ": farthest " << (a - w).abs().max().item<double>() << " of " << w.abs().max().item<double>();
  } else {
    ASSERT_LE((a - w).abs().max().item<double>(), tolerance * w.abs().max().item<double>()) << what;
  }
}

void on_mesh(const Mesh& mesh, const std::function<void(std::shared_ptr<MeshComm>)>& body, const ThreadsOptions& threads,
             std::shared_ptr<Trace> trace) {
  run_threads(
      mesh.size(),
      [&](std::shared_ptr<Comm> comm) {
        if (trace) comm = traced(comm, trace);
        body(std::make_shared<MeshComm>(comm, mesh));
      },
      threads);
}

std::map<std::string, int64_t> calls_of(const Trace& trace, int64_t rank, size_t from) {
  std::map<std::string, int64_t> calls;
  const auto records = trace.of_rank(rank);
  for (size_t i = from; i < records.size(); ++i)
    if (!of_set_up(records[i])) ++calls[records[i].op];
  return calls;
}

}  // namespace parity
