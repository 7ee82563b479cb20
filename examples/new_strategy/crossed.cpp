// A strategy, a claim about it, and the program that proves both: docs/extending.md.
#include <harness/commands/program.h>
#include <harness/run/property.h>
#include <shardproof/shardproof.h>

using namespace shardproof;

// As hsdp, parameters, gradients and optimizer state are split within each replica. But between forward and backward a bucket
// stays split over the replicas. So the gathers of a backward cross the replicas, and its sums stay within one.
Strategy crossed() {
  const Layout whole = replicated(), within = split_flat(whole, {"dp_shard", {}});
  Strategy row;
  row.name = "crossed";
  row.axes = {"dp_replicate", "dp_shard"};
  row.compute = whole;
  row.between = split_flat(whole, {"dp_replicate", {}});
  row.parameter = row.state = within;
  row.produced = add_partial(add_partial(whole, "dp_replicate"), "dp_shard");
  row.accumulated = add_partial(within, "dp_replicate");
  return row;
}

// What a rank updates is what it keeps, so nothing has to be gathered after an update.
harness::Complaint keeps_what_it_updates(const harness::LiveRun& run) {
  const std::vector<Piece> kept = run.sharded.parameters(), updated = run.sharded.main_parameters();
  for (size_t i = 0; i < std::max(kept.size(), updated.size()); ++i)
    if (i >= kept.size() || i >= updated.size() || kept[i].name != updated[i].name || kept[i].run != updated[i].run)
      return fmt::format("piece {} of {} is not the one that is updated", i, kept.size());
  return {};
}

int main(int argc, char** argv) {
  register_strategy(crossed());
  harness::register_property({.name = "keeps_what_it_updates",
                              // Not where some units have another strategy, or small parameters stay whole on request.
                              .applies =
                                  [](const harness::Case& c) {
                                    return c.strategy == "crossed" && !has_unit_sharding(c) &&
                                           c.options.of("keep_whole_numel_max") == 0;
                                  },
                              .live = keeps_what_it_updates});
  return harness::run_program(argc, argv);
}
