#include "bench/parts.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <unordered_set>

#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/comm/counted.h"
#include "shardproof/comm/redistribute.h"
#include "shardproof/comm/timeline.h"
#include "shardproof/shardproof.h"

namespace bench {
namespace {

using namespace shardproof;

constexpr int64_t kElements = 65536;

// Values that are neither equal nor special, the same every time.
at::Tensor values(std::vector<int64_t> sizes, double phase) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return at::arange(count, at::kFloat).mul_(0.37).add_(phase).sin_().view(sizes);
}

Part update(const std::string& name, const std::shared_ptr<UpdateRule>& rule) {
  return {"update/" + name, [rule, name] {
            struct Run {
              std::string name = "weight";
              Shape shape = {256, 256};
              at::Tensor parameter = values({kElements}, 0.1), gradient = values({kElements}, 0.7);
              std::vector<at::Tensor> state;
            };
            auto run = std::make_shared<Run>();
            for (size_t i = 0; i < rule->state_names().size(); ++i) run->state.push_back(at::zeros({kElements}));
            return [rule, run] {
              const at::NoGradGuard no_grad;
              rule->update({run->name, run->shape, run->parameter, run->gradient, run->state});
            };
          }};
}

// A selector that holds a list of all units, as many callers' do.
UnitSelector these(const torch::nn::Module& model) {
  std::unordered_set<const torch::nn::Module*> chosen;
  for (const auto& module : model.modules(/*include_self=*/false))
    if (module->as<LinearImpl>()) chosen.insert(module.get());
  return [chosen](const std::string&, const torch::nn::Module& module) { return chosen.contains(&module); };
}

// A rank of a world in which it is alone, with a model of many small units: what remains is the work around the arithmetic.
struct Alone {
  std::shared_ptr<MeshComm> comms;
  Mlp model;
  std::shared_ptr<Sharded> sharded;
  std::shared_ptr<Optimizer> optimizer;
  at::Tensor input;

  Alone(const char* mesh, const char* strategy_name, int64_t layers, bool measured = false)
      : model(MlpOptions{.widths = std::vector<int64_t>(static_cast<size_t>(layers) + 1, 16)}) {
    const Mesh ranks = Mesh::parse(mesh);
    std::shared_ptr<Comm> comm = counted(ranks.size(), 0);
    if (measured) comm = traced(comm, std::make_shared<Trace>(), std::make_shared<Timeline>());
    comms = std::make_shared<MeshComm>(comm, ranks);
    initialize_parameters(*model, /*seed=*/1, /*standard_deviation=*/0.1);
    sharded = std::make_shared<Sharded>(fully_shard(model.ptr(), comms,
                                                    {.strategy = strategy(strategy_name),
                                                     .units = these(*model),
                                                     .buffers = Buffers::pooled,
                                                     .check_gradients = false,
                                                     .broadcast_initial_values = false}));
    optimizer = std::make_shared<Optimizer>(*sharded, make_rule(AdamWOptions{}));
    input = values({2, 16}, 0.2);
  }
  void backward() { call(model, input).sum().backward(); }
};

// Bookkeeping of so many tensors, two to a unit, beside that of four times as many: ci/instructions compares the two.
constexpr int64_t kFewTensors = 500, kManyTensors = 2000;

Part growth_of_sharding(int64_t tensors) {
  return {fmt::format("growth/shard/{}", tensors),
          [=]() -> std::function<void()> { return [=] { Alone("dp_shard=4", "zero3", tensors / 2); }; }};
}

// Finding the collectives of a unit takes a rank the same, however many others there are.
constexpr int64_t kFewRanks = 64, kManyRanks = 16384;

Part level_of_collectives(int64_t ranks) {
  return {fmt::format("level/collectives/{}", ranks), [=] {
            const Mesh mesh({{"dp_shard", ranks}});
            const Shape bucket = {kManyRanks * 3};
            const Layout cut = split_flat(replicated(), Split{"dp_shard"}), terms = add_partial(replicated(), "dp_shard");
            return [=] {
              for (int64_t unit = 0; unit < 100; ++unit) {
                lower(bucket, mesh, cut, replicated());
                lower(bucket, mesh, terms, cut);
              }
            };
          }};
}

Part growth_of_a_step(int64_t tensors) {
  return {fmt::format("growth/step/{}", tensors), [=] {
            auto alone = std::make_shared<Alone>("dp_shard=4", "zero3", tensors / 2);
            return [alone] {
              alone->backward();
              alone->optimizer->step();
            };
          }};
}

Part step(const std::string& name, const char* mesh, const char* strategy_name, bool measured = false) {
  return {"step/" + name, [=] {
            auto alone = std::make_shared<Alone>(mesh, strategy_name, 24, measured);
            return [alone] {
              alone->backward();
              alone->optimizer->step();
            };
          }};
}

Part redistribution(const std::string& name, const Layout& from, const Layout& to) {
  return {"redistribute/" + name, [=] {
            const Mesh mesh = Mesh::parse("dp_shard=4,tp=2");
            const Shape shape = {250, 128};
            auto comms = std::make_shared<MeshComm>(counted(mesh.size(), 3), mesh);
            int64_t count = 0;
            for (const Box& box : owned(shape, mesh, from, 3)) count += numel(box);
            const at::Tensor local = values({count}, 0.3);
            return [=] { redistribute(local, shape, from, to, *comms); };
          }};
}

Part plan_of_resharding() {
  return {"layout/plan", [] {
            const Layout rows = split_dim(split_dim(replicated(), 0, Split{"tp"}), 0, Split{"dp_shard"});
            const Layout columns = split_flat(split_dim(replicated(), 1, Split{"tp"}), Split{"dp_shard"});
            const Placement from{Mesh::parse("dp_shard=16,tp=4"), rows}, to{Mesh::parse("dp_shard=24,tp=2"), columns};
            return [=] {
              for (int64_t rank = 0; rank < 8; ++rank) plan_for_target({512, 384}, from, to, rank);
            };
          }};
}

Part steps_between_layouts() {
  return {"layout/lower", [] {
            const Mesh mesh = Mesh::parse("dp_replicate=2,dp_shard=4,tp=2");
            const std::vector<Layout> layouts = {replicated(),
                                                 split_dim(replicated(), 0, Split{"dp_shard"}),
                                                 split_flat(replicated(), Split{"dp_shard"}),
                                                 add_partial(replicated(), "dp_shard"),
                                                 split_dim(replicated(), 1, Split{"tp"}),
                                                 split_flat(split_dim(replicated(), 1, Split{"tp"}), Split{"dp_shard"})};
            return [=] {
              for (const Layout& from : layouts)
                for (const Layout& to : layouts)
                  if (to.partial.empty()) lower({96, 64}, mesh, from, to);
            };
          }};
}

Part norm() {
  return {"gradient_norm", [] {
            auto alone = std::make_shared<Alone>("dp_shard=4", "zero3", 24);
            alone->backward();
            return [alone] { alone->sharded->gradient_norm(); };
          }};
}

struct Folder {
  std::string path = (std::filesystem::temp_directory_path() / "shardproof_parts_XXXXXX").string();
  Folder() { SHARD_REQUIRE(mkdtemp(path.data()), "bench", "cannot make a folder {}", path); }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

// Until the first byte is written.
Part growth_of_a_save(int64_t tensors) {
  return {fmt::format("growth/save/{}", tensors), [=] {
            auto alone = std::make_shared<Alone>("dp_shard=4", "zero3", tensors / 2);
            auto folder = std::make_shared<Folder>();
            return [=] { checkpoint::SaveJob(folder->path + "/c", *alone->sharded, alone->optimizer.get(), {}, {}, nullptr); };
          }};
}

// Both texts that describe a checkpoint, written and read: of tensors that 4 ranks hold alike.
Part growth_of_metadata(int64_t tensors) {
  return {fmt::format("growth/metadata/{}", tensors), [=] {
            auto described = std::make_shared<checkpoint::Checkpoint>();
            auto sums = std::make_shared<checkpoint::Checksums>();
            std::vector<uint64_t> ends(4, 0);  // of the ranks' files
            for (int64_t i = 0; i < tensors; ++i) {
              checkpoint::StoredTensor& tensor = described->tensors[fmt::format("model.layers.{}.weight", i)];
              tensor = {Dtype::Float, {8, 16}, {}};
              for (int64_t rank = 0; rank < 4; ++rank) {
                uint64_t& end = ends[static_cast<size_t>(rank)];
                tensor.chunks.push_back({{2 * rank, 0}, {2, 16}, {checkpoint::entry_file_name(rank), end, 1152}});
                checkpoint::add(*sums, {tensor.chunks.back().extent, static_cast<uint32_t>(i)});
                end += 1152;
              }
            }
            return [=] {
              checkpoint::validate(*described, "what is written");
              const std::string metadata = checkpoint::write_metadata(*described), sidecar = checkpoint::write_checksums(*sums);
              checkpoint::validate(checkpoint::read_metadata(metadata, "what was written"), "what was written");
              checkpoint::read_checksums(sidecar, "what was written");
            };
          }};
}

// Of 100 tensors that are small, so that planning, names and metadata are most of the work.
Part checkpoint_of_small_tensors(bool load) {
  return {load ? "checkpoint/load" : "checkpoint/save", [load]() -> std::function<void()> {
            auto alone = std::make_shared<Alone>("dp_shard=1", "zero3", 50);
            auto folder = std::make_shared<Folder>();
            checkpoint::save(folder->path + "/c", *alone->sharded, alone->optimizer.get());
            if (load) return [=] { checkpoint::load(folder->path + "/c", *alone->sharded, alone->optimizer.get()); };
            return [=] {
              checkpoint::save(folder->path + "/c", *alone->sharded, alone->optimizer.get(), {}, {.overwrite = true});
            };
          }};
}

}  // namespace

std::vector<Part> parts() {
  const Layout rows = split_dim(replicated(), 0, Split{"dp_shard"}), columns = split_dim(replicated(), 1, Split{"tp"});
  return {
      plan_of_resharding(),
      steps_between_layouts(),
      redistribution("gather", rows, replicated()),
      redistribution("general", split_flat(columns, Split{"dp_shard"}), split_dim(rows, 1, Split{"tp"})),
      step("zero3", "dp_shard=4", "zero3"),
      step("zero3_traced", "dp_shard=4", "zero3", /*measured=*/true),
      step("hfsdp", "dp_replicate=2,dp_shard=2", "hfsdp"),
      step("zero1", "dp_shard=4", "zero1"),
      norm(),
      update("adamw", make_rule(AdamWOptions{})),
      update("sgd", make_rule(SgdOptions{.momentum = 0.9})),
      update("lion", make_rule(LionOptions{})),
      update("muon", make_rule(MuonOptions{})),
      checkpoint_of_small_tensors(/*load=*/false),
      checkpoint_of_small_tensors(/*load=*/true),
  };
}

std::vector<Part> parts_of_growth() {
  std::vector<Part> parts;
  for (const int64_t tensors : {kFewTensors, kManyTensors})
    for (const Part& part :
         {growth_of_sharding(tensors), growth_of_a_step(tensors), growth_of_a_save(tensors), growth_of_metadata(tensors)})
      parts.push_back(part);
  for (const int64_t ranks : {kFewRanks, kManyRanks}) parts.push_back(level_of_collectives(ranks));
  return parts;
}

}  // namespace bench
