#include "harness/run/process_ranks.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "harness/case/problem.h"
#include "harness/run/case_checkpoints.h"
#include "harness/run/comm_texts.h"
#include "harness/run/sharded_run.h"
#include "harness/run/step_bytes.h"
#include "shardproof/comm/agree.h"

namespace harness {

using shardproof::Comm;

Steps ProcessRanks::train_part(Case c, const golden::Run& run, CaseCheckpoints& checkpoints, Comm& comm) const {
  if (!shares_memory_) c.options.set("gather", "copied");
  const auto run_world = [&](const Case& now, const RankBody& body) {
    const bool takes_part = comm.rank() < now.mesh.size();
    const auto members = comm.split(takes_part ? 0 : -1, 0, "world");
    if (members) body(members);
    // A world may read what the one before it has saved.
    comm.barrier().wait();
  };
  Steps steps = run_sharded({.c = c, .run = run, .run_world = run_world, .device = device_}, checkpoints);
  std::vector<RankStep> mine;
  for (auto& ranks : steps)
    mine.push_back(comm.rank() < static_cast<int64_t>(ranks.size()) ? std::move(ranks[static_cast<size_t>(comm.rank())])
                                                                    : RankStep{});
  const std::vector<std::string> all = collect_bytes(comm, to_bytes(mine));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    std::vector<RankStep> column = steps_from(all[rank]);
    for (size_t s = 0; s < steps.size(); ++s)
      if (rank < steps[s].size()) steps[s][rank] = std::move(column[s]);
  }
  return steps;
}

Steps ProcessRanks::train(const Case& c, const golden::Run& run) {
  for (size_t s = 0; s < c.steps.size(); ++s)
    SHARD_REQUIRE(c.at(s).mesh.size() <= world_.size(), "harness",
                  "the case's mesh {} has {} ranks, and there are {} processes", c.at(s).mesh.str(), c.at(s).mesh.size(),
                  world_.size());
  Steps steps;
  CaseCheckpoints checkpoints(c, /*ranks_are_threads=*/false);
  world_.run([&](std::shared_ptr<Comm> comm) {
    shardproof::broadcast_text(*comm, c.str(), 0);
    shardproof::broadcast_text(*comm, checkpoints.directory(), 0);
    steps = train_part(c, run, checkpoints, *comm);
  });
  return steps;
}

int ProcessRanks::serve() {
  for (;;) {
    std::string asked;
    try {
      world_.run([&](std::shared_ptr<Comm> comm) {
        asked = shardproof::broadcast_text(*comm, "", 0);
        if (asked.starts_with("end ")) return;
        const Case c = Case::parse(asked);
        CaseCheckpoints checkpoints(c, shardproof::broadcast_text(*comm, "", 0));
        train_part(c, make_run(c), checkpoints, *comm);
      });
    } catch (const shardproof::WorldLostError&) {
      throw;
    } catch (const std::exception&) {
      // Rank 0 has the same error, and makes a verdict of it.
    }
    if (asked.starts_with("end ")) return std::stoi(asked.substr(4));
  }
}

void ProcessRanks::end(int exit_code) {
  world_.run([&](std::shared_ptr<Comm> comm) { shardproof::broadcast_text(*comm, fmt::format("end {}", exit_code), 0); });
}

}  // namespace harness
