#include "shardproof/optim/ema.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

void require_decay(double decay) {
  SHARD_REQUIRE(decay >= 0 && decay < 1, "ema", "the decay must be in [0, 1), got {}", decay);
}

void require_free_name(const Sharded::Impl& sharded, const std::string& name) {
  for (const char* used : {"", "model", "optim", "trainer", "shardproof"})
    SHARD_REQUIRE(name != used, "ema", "the name '{}' cannot be that of averages in checkpoints; choose another", name);
  SHARD_REQUIRE(name.find('.') == std::string::npos, "ema", "the name '{}' must not contain a dot", name);
  SHARD_REQUIRE(!sharded.kept_along.contains(name), "ema",
                "this model has averages called '{}' already. Give these another name", name);
}

void exchange(const at::Tensor& one, const at::Tensor& other) {
  const at::Tensor kept = one.clone();
  one.copy_(other);
  other.copy_(kept);
}

}  // namespace

struct Ema::State {
  std::weak_ptr<Sharded::Impl> sharded;
  EmaOptions options;
  std::vector<at::Tensor> averages;  // by bucket, as the bucket's main parameters lie
  std::vector<at::Tensor> wide;      // while averages are in place: what ranks hold of parameters besides main ones

  std::shared_ptr<Sharded::Impl> model() const {
    std::shared_ptr<Sharded::Impl> impl = sharded.lock();
    SHARD_REQUIRE(impl != nullptr, "ema", "the Sharded whose parameters '{}' averages is gone", options.name);
    return impl;
  }

  std::vector<Shard> shards() const {
    std::vector<Shard> all;
    const std::vector<Bucket*> buckets = model()->schedule.buckets();
    for (size_t b = 0; b < buckets.size(); ++b) {
      std::vector<Shard> own = buckets[b]->shards(averages[b]);
      std::move(own.begin(), own.end(), std::back_inserter(all));
    }
    return all;
  }

  bool in_place() const {
    const std::shared_ptr<Sharded::Impl> impl = sharded.lock();
    return impl && impl->averages_in_place == options.name;
  }

  void update() const;
  void put_in();
  void put_back();
};

void Ema::State::update() const {
  model()->finish_reads();
  const std::vector<Bucket*> buckets = model()->schedule.buckets();
  for (size_t b = 0; b < buckets.size(); ++b) {
    buckets[b]->parameters.await_main();
    for (const OwnPart& part : buckets[b]->parts())
      if (buckets[b]->trains(part.member))
        part.of(averages[b]).mul_(options.decay).add_(part.of(buckets[b]->parameters.main()) * (1 - options.decay));
  }
}

void Ema::State::put_in() {
  const std::shared_ptr<Sharded::Impl> impl = model();
  const std::vector<Bucket*> buckets = impl->schedule.buckets();
  for (size_t b = 0; b < buckets.size(); ++b) {
    const BucketParameters& parameters = buckets[b]->parameters;
    at::Tensor& copy = wide.emplace_back();
    if (const at::Tensor& held = parameters.parameter(); held.defined() && held.numel() > averages[b].numel()) {
      copy = impl->memory->allocate(MemoryKind::parameter, held.numel(), buckets[b]->rules().compute);
      copy.copy_(held);
    }
    exchange(parameters.main(), averages[b]);
  }
  impl->averages_in_place = options.name;
}

// Whatever is being gathered is awaited first, since gathers read what is written here.
void Ema::State::put_back() {
  const std::shared_ptr<Sharded::Impl> impl = model();
  std::exception_ptr failed;
  try {
    for (const auto& unit : impl->schedule.units()) unit->drop();
  } catch (...) {
    failed = std::current_exception();
  }
  const std::vector<Bucket*> buckets = impl->schedule.buckets();
  for (size_t b = 0; b < buckets.size(); ++b) {
    buckets[b]->parameters.await_main();
    exchange(buckets[b]->parameters.main(), averages[b]);
    buckets[b]->parameters.put_back(wide[b]);
  }
  wide.clear();
  impl->averages_in_place.clear();
  if (failed) std::rethrow_exception(failed);
}

Ema::Ema(Sharded& sharded, EmaOptions options) : state_(std::make_shared<State>()) {
  const at::NoGradGuard no_grad;
  Sharded::Impl& impl = sharded.impl();
  require_decay(options.decay);
  require_free_name(impl, options.name);
  impl.require_own_values("Ema");
  state_->sharded = sharded.watch();
  state_->options = std::move(options);
  for (Bucket* bucket : impl.schedule.buckets()) {
    bucket->parameters.await_main();
    const at::Tensor average = bucket->parameters.allocate_state(bucket->parameters.main().numel());
    average.copy_(bucket->parameters.main());
    state_->averages.push_back(average);
  }
  impl.kept_along[state_->options.name] = [state = std::weak_ptr<State>(state_)] { return state.lock()->shards(); };
}

Ema::~Ema() {
  if (!state_) return;
  put_back();
  if (const std::shared_ptr<Sharded::Impl> impl = state_->sharded.lock()) impl->kept_along.erase(state_->options.name);
}

Ema::Ema(Ema&&) noexcept = default;

void Ema::update() {
  const at::NoGradGuard no_grad;
  state_->model()->require_own_values("Ema::update");
  state_->update();
}

void Ema::set_decay(double decay) {
  require_decay(decay);
  state_->options.decay = decay;
}

std::vector<Piece> Ema::pieces() const {
  std::vector<Piece> pieces;
  const int64_t rank = state_->model()->comms->rank();
  for (const Shard& shard : state_->shards()) append_pieces(shard, rank, pieces);
  return pieces;
}

std::map<std::string, at::Tensor> Ema::gather() const {
  const std::shared_ptr<Sharded::Impl> impl = state_->model();
  impl->schedule.require_no_backward("Ema::gather");
  return impl->gather(state_->shards());
}

at::Tensor Ema::gather(const std::string& parameter) const {
  const std::shared_ptr<Sharded::Impl> impl = state_->model();
  impl->schedule.require_no_backward("Ema::gather");
  return impl->gather_one("Ema::gather", state_->shards(), parameter);
}

void Ema::write(const std::map<std::string, at::Tensor>& values) {
  const std::shared_ptr<Sharded::Impl> impl = state_->model();
  impl->require_own_values("Ema::write");
  impl->write("Ema::write", state_->shards(), values);
}

void Ema::swap_in() {
  const at::NoGradGuard no_grad;
  const std::shared_ptr<Sharded::Impl> impl = state_->model();
  impl->require_own_values("Ema::swap_in");
  impl->begin_update();
  state_->put_in();
  try {
    Sharded(impl).main_parameters_changed();
  } catch (...) {
    put_back();
    throw;
  }
}

void Ema::swap_out() {
  const std::shared_ptr<Sharded::Impl> impl = state_->model();
  SHARD_REQUIRE(state_->in_place(), "ema", "swap_out (rank {}): the averages '{}' are not in the place of the parameters",
                impl->comms->rank(), state_->options.name);
  const at::NoGradGuard no_grad;
  impl->begin_update();
  state_->put_back();
}

bool Ema::is_swapped_in() const {
  return state_->in_place();
}

// What a gather that failed with the others has to say is said already.
void Ema::put_back() noexcept {
  if (!state_->in_place()) return;
  const at::NoGradGuard no_grad;
  try {
    state_->put_back();
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace shardproof
