#include "shardproof/optim/fingerprint_check.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>

#include "internal/device/flat_math.h"
#include "sharding/sharded_impl.h"
#include "internal/base/call_label.h"
#include "internal/device/fingerprint.h"

namespace shardproof {
namespace {

// What this rank holds of one tensor between steps.
struct Held {
  std::string kind;  // "parameter", "main parameter", or the name of a state
  Shard shard;
  int64_t replicas = 0;  // the number of its ReplicaMap
};

// What `first_holders` says. The same for all tensors that are cut alike.
using ReplicaMap = std::vector<int64_t>;

bool has_replicas(const ReplicaMap& map) {
  for (int64_t rank = 0; rank < std::ssize(map); ++rank)
    if (map[static_cast<size_t>(rank)] != rank) return true;
  return false;
}

// Replica maps, each with its number.
class ReplicaMaps {
 public:
  int64_t number_of(const Shard& shard) {
    Layout cut = shard.at.layout;
    cut.bucket = {};  // parameters of a bucket are held by the same ranks
    const auto [found, added] = numbers_.try_emplace(fmt::format("{} on {}", cut.str(), shard.at.mesh.str()));
    if (added) {
      const ReplicaMap map = first_holders(shard.shape, shard.at.mesh, shard.at.layout);
      found->second = std::ranges::find(maps_, map) - maps_.begin();
      if (found->second == std::ssize(maps_)) maps_.push_back(map);
    }
    return found->second;
  }
  const std::vector<ReplicaMap>& maps() const { return maps_; }

 private:
  std::map<std::string, int64_t> numbers_;
  std::vector<ReplicaMap> maps_;
};

// In the same order on every rank. Tensors that no other rank holds are left out.
std::vector<Held> held_in_copies(const Sharded::Impl& sharded, const Optimizer& optimizer, ReplicaMaps& maps) {
  std::vector<Held> held;
  const auto add = [&](const std::string& kind, const std::vector<Shard>& shards) {
    for (const Shard& shard : shards) {
      const int64_t number = maps.number_of(shard);
      if (has_replicas(maps.maps()[static_cast<size_t>(number)])) held.push_back({kind, shard, number});
    }
  };
  for (const Bucket* bucket : sharded.schedule.buckets())
    if (bucket->parameters.encoding() != Encoding::when_sent) add("parameter", bucket->parameters.shards());
  for (const Bucket* bucket : sharded.schedule.buckets())
    if (bucket->parameters.encoding() != Encoding::plain)
      add("main parameter", bucket->shards(bucket->parameters.main()));
  for (const std::string& name : optimizer.state_names()) add(name, optimizer.state_shards(name));
  return held;
}

// What only this rank can know, as two integers of its row.
enum Complaint : int64_t { kNone, kPadding, kStill };
struct Own {
  int64_t complaint = kNone, bucket = 0, member = 0;
};

// A run of a parameter that the next update has to move, and what it is before.
struct Watched {
  int64_t bucket = 0, member = 0, updates = 0;
  std::vector<at::Tensor> live = {}, before = {};
};

// Elements in which an update by `rate` is far above a rounding of some parameter.
std::optional<Interval> moving(const at::Tensor& gradient, const at::Tensor& parameter, double rate) {
  constexpr int64_t kSoon = 1024, kLater = int64_t{1} << 16;
  const double rounding = parameter.scalar_type() == at::kDouble ? 0x1p-48
                          : parameter.scalar_type() == at::kFloat ? 0x1p-19
                          : parameter.scalar_type() == at::kHalf  ? 0x1p-6
                                                                  : 0x1p-3;
  for (Interval run{0, kSoon}; run.begin < gradient.numel(); run = {run.end, run.end + kLater}) {
    run.end = std::min(run.end, gradient.numel());
    const auto part = [&](const at::Tensor& values) { return values.narrow(0, run.begin, run.size()).abs(); };
    if (part(gradient).mul_(rate).gt(part(parameter).mul_(rounding)).any().item<bool>()) return run;
  }
  return {};
}

std::map<std::string, double> rates_of(const Optimizer& optimizer) {
  std::map<std::string, double> rates;
  for (const Optimizer::Group& group : optimizer.groups())
    for (const auto& [name, value] : group.settings)
      if (const auto* rate = std::get_if<double>(&value); rate && name == "lr")
        for (const std::string& parameter : group.parameters) rates[parameter] = *rate;
  return rates;
}

std::vector<int64_t> gathered(Comm& world, const std::vector<int64_t>& row) {
  const auto count = static_cast<int64_t>(row.size());
  at::Tensor own = at::empty({count}, at::kLong), all = at::empty({world.size() * count}, at::kLong);
  std::copy(row.begin(), row.end(), own.mutable_data_ptr<int64_t>());
  world.all_gather(all, own).wait();
  const int64_t* values = all.const_data_ptr<int64_t>();
  return {values, values + all.numel()};
}

}  // namespace

struct FingerprintCheck::State {
  std::weak_ptr<Sharded::Impl> sharded;
  const Optimizer* optimizer;
  ReplicaMaps maps;
  std::vector<Watched> watched;

  void begin_update(const Sharded::Impl& impl);
  Own own_complaint(const Sharded::Impl& impl) const;
  void throw_of(const Sharded::Impl& impl, int64_t rank, const Own& own) const;
  void throw_of_replicas(const Sharded::Impl& impl, const std::vector<Held>& held, const std::vector<int64_t>& prints) const;
};

void FingerprintCheck::State::begin_update(const Sharded::Impl& impl) {
  watched.clear();
  const std::map<std::string, double> rates = rates_of(*optimizer);
  std::map<std::string, std::vector<at::Tensor>> states;
  for (const std::string& name : optimizer->state_names())
    for (const Shard& shard : optimizer->state_shards(name)) states[shard.name].push_back(shard.data);
  const std::vector<Bucket*> buckets = impl.schedule.buckets();
  for (int64_t b = 0; b < std::ssize(buckets); ++b) {
    Bucket& bucket = *buckets[static_cast<size_t>(b)];
    if (!bucket.gradient.final()) continue;
    bucket.gradient.await_values();
    for (const OwnPart& part : bucket.parts()) {
      const std::string& name = part.parameter->name;
      const auto rate = rates.find(name);
      if (!bucket.trains(part.member) || rate == rates.end() || part.local.size() == 0) continue;
      const at::Tensor parameter = part.of(bucket.parameters.main());
      const auto run = moving(part.of(bucket.gradient.values()), parameter, rate->second);
      if (!run) continue;
      Watched watch{.bucket = b, .member = part.member, .updates = optimizer->updates(name)};
      watch.live.push_back(parameter);
      for (const at::Tensor& state : states[name]) watch.live.push_back(state);
      for (at::Tensor& live : watch.live) {
        live = live.narrow(0, run->begin, run->size());
        watch.before.push_back(live.clone());
      }
      watched.push_back(std::move(watch));
    }
  }
}

Own FingerprintCheck::State::own_complaint(const Sharded::Impl& impl) const {
  const std::vector<Bucket*> buckets = impl.schedule.buckets();
  for (int64_t b = 0; b < std::ssize(buckets); ++b) {
    const Bucket& bucket = *buckets[static_cast<size_t>(b)];
    const auto is_zero = [](const LocalView& view, const at::Tensor& values) {
      return !values.defined() || std::all_of(view.padding.begin(), view.padding.end(), [&](const Interval& padding) {
        return all_zero(values.narrow(0, padding.begin, padding.size()));
      });
    };
    // Of an interleaved bucket the optimizer's part alone: all of it would be a look for each rank and parameter.
    if ((!bucket.layout().is_interleaved() && !is_zero(bucket.layout().parameter(), bucket.parameters.parameter())) ||
        !is_zero(bucket.layout().state(), bucket.parameters.main()))
      return {kPadding, b, 0};
  }
  for (const Watched& watch : watched) {
    const bool still = std::equal(watch.live.begin(), watch.live.end(), watch.before.begin(),
                                  [](const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); });
    const auto& members = buckets[static_cast<size_t>(watch.bucket)]->layout().members();
    const std::string& name = members[static_cast<size_t>(watch.member)].name;
    if (still && optimizer->updates(name) > watch.updates) return {kStill, watch.bucket, watch.member};
  }
  return {};
}

void FingerprintCheck::State::throw_of(const Sharded::Impl& impl, int64_t rank, const Own& own) const {
  const auto& members = impl.schedule.buckets()[static_cast<size_t>(own.bucket)]->layout().members();
  const std::string& name = members[static_cast<size_t>(own.member)].name;
  const int64_t step = impl.schedule.step();  // the one that has just ended, counted from 1
  if (own.complaint == kPadding)
    throw FingerprintError(message(
        "[fingerprint] step {}: on rank {} the padding of the bucket of {} is not zero. Something wrote behind a parameter; "
        "look for views that the program keeps of gathered parameters",
        step, rank, name));
  throw FingerprintError(message(
      "[fingerprint] step {}: on rank {} neither {} nor its optimizer state has moved, though its gradient is not zero. The "
      "update of this rank's part is lost, or its rule does nothing",
      step, rank, name));
}

void FingerprintCheck::State::throw_of_replicas(const Sharded::Impl& impl, const std::vector<Held>& held,
                                                const std::vector<int64_t>& prints) const {
  const std::vector<int64_t> all = gathered(impl.comms->world(), prints);
  std::optional<std::string> first;
  int64_t differing = 0;
  for (size_t i = 0; i < held.size(); ++i) {
    const ReplicaMap& map = maps.maps()[static_cast<size_t>(held[i].replicas)];
    for (size_t rank = 0; rank < map.size(); ++rank) {
      if (all[rank * held.size() + i] == all[static_cast<size_t>(map[rank]) * held.size() + i]) continue;
      ++differing;
      if (!first) first = message("{} {} differs between ranks {} and {}", held[i].kind, held[i].shard.name, map[rank], rank);
      break;
    }
  }
  SHARD_CHECK(first, "fingerprint", "ranks differ in no tensor, though they differ in all of them together");
  throw FingerprintError(message(
      "[fingerprint] step {}: {}, which hold the same elements of it; {} of {} tensors that are held in copies differ. A sum "
      "or an update was not the same on these ranks, they drew different random numbers, or something wrote on one of them "
      "alone. Go back to a checkpoint from before this step",
      impl.schedule.step(), *first, differing, held.size()));
}

FingerprintCheck::FingerprintCheck(Sharded& sharded, Optimizer& optimizer)
    : state_(std::make_shared<State>(State{sharded.watch(), &optimizer, {}, {}})) {
  sharded.impl().before_update.push_back([state = std::weak_ptr<State>(state_), impl = sharded.watch()] {
    if (const auto alive = state.lock()) alive->begin_update(*impl.lock());
  });
}

FingerprintCheck::~FingerprintCheck() = default;

void FingerprintCheck::step() {
  const at::NoGradGuard no_grad;
  const CallLabel label("the comparison of fingerprints");
  const std::shared_ptr<Sharded::Impl> impl = state_->sharded.lock();
  SHARD_REQUIRE(impl != nullptr, "fingerprint", "the Sharded that this check was made for is gone");
  for (Bucket* bucket : impl->schedule.buckets()) bucket->parameters.await_main();
  const std::vector<Held> held = held_in_copies(*impl, *state_->optimizer, state_->maps);
  const Own own = state_->own_complaint(*impl);
  state_->watched.clear();
  std::vector<int64_t> prints;
  // Of each replica map the tensors together, then what this rank alone knows.
  std::vector<int64_t> row(state_->maps.maps().size(), 0);
  for (const Held& one : held) {
    const uint64_t print = fingerprint(one.shard.data);
    prints.push_back(static_cast<int64_t>(print));
    int64_t& together = row[static_cast<size_t>(one.replicas)];
    together = static_cast<int64_t>(combined(static_cast<uint64_t>(together), print));
  }
  row.insert(row.end(), {own.complaint, own.bucket, own.member});
  // Every rank looks at the same table, so all go on, or all throw the same.
  const std::vector<int64_t> all = gathered(impl->comms->world(), row);
  const auto at = [&](int64_t rank, size_t column) { return all[static_cast<size_t>(rank) * row.size() + column]; };
  const std::vector<ReplicaMap>& maps = state_->maps.maps();
  for (size_t map = 0; map < maps.size(); ++map)
    for (int64_t rank = 0; rank < std::ssize(maps[map]); ++rank)
      if (at(rank, map) != at(maps[map][static_cast<size_t>(rank)], map))
        state_->throw_of_replicas(*impl, held, prints);
  for (int64_t rank = 0; rank < impl->comms->world().size(); ++rank)
    if (at(rank, maps.size()) != kNone)
      state_->throw_of(*impl, rank, {at(rank, maps.size()), at(rank, maps.size() + 1), at(rank, maps.size() + 2)});
}

}  // namespace shardproof
