#include "comm/threads/threads_world.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "comm/threads/own_stream.h"
#include "comm/threads/rank_error.h"
#include "comm/threads/threads_host_work.h"
#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/device.h"
#include "internal/base/call_label.h"

namespace shardproof::threads {
namespace {

// From here on the ranks that wait share the work of a collective; below, the last to arrive does it at once, which
// spares the others a wake-up.
constexpr int64_t kSharedBytesMin = 256 << 10;

// The world and rank that this thread is.
struct Current {
  const World* world = nullptr;
  int64_t rank = -1;
};
thread_local Current current;

void require_own_thread(const World* world, int64_t rank) {
  SHARD_REQUIRE(current.world == world && current.rank == rank, "threads",
                "the communicator of rank {} is used {}; call it only on the thread and within the body that it was "
                "given to",
                rank, current.world == world ? fmt::format("by rank {}", current.rank) : "outside of its world");
}

// Of a barrier, the CPU.
c10::Device device_of(const Call& call) {
  return call.output.defined() ? call.output.device() : call.input.defined() ? call.input.device() : c10::Device(at::kCPU);
}

void require_supported(const Call& call, ThreadsOptions::Completion completion) {
  for (const at::Tensor* tensor : {&call.input, &call.output})
    SHARD_REQUIRE(!tensor->defined() || (has_device_math(tensor->device()) && tensor->device() == device_of(call)), "threads",
                  "{}: expected tensors on the CPU, or on one device that has arithmetic (shardproof::use_cuda), got one on {}",
                  describe(call), tensor->device().str());
  SHARD_REQUIRE(device_of(call).is_cpu() || completion == ThreadsOptions::Completion::eager, "threads",
                "{}: completions other than eager keep copies of CPU tensors, and this one is on {}", describe(call),
                device_of(call).str());
  if (call.op == Op::reduce_scatter || call.op == Op::all_reduce)
    SHARD_REQUIRE(can_reduce(dtype(call)), "threads",
                  "{}: no reduction of this dtype; use float32, float64, bfloat16, float16, int32, int64 or uint8",
                  describe(call));
}

int64_t part_of(const Call& call, int64_t group_rank) {
  if (call.op == Op::send) return 0;
  return call.op == Op::recv ? 1 : group_rank;
}

Stream& stream_of(Group& group, const Call& call, int64_t group_rank) {
  if (call.op != Op::send && call.op != Op::recv) return group.collectives;
  const int64_t source = call.op == Op::send ? group_rank : call.peer;
  const int64_t target = call.op == Op::send ? call.peer : group_rank;
  const std::vector<int64_t> ranks = {group.ranks[source], group.ranks[target]};
  return group.channels.try_emplace({source, target, call.tag}, group.name, ranks).first->second;
}

// Whether the input lies in the output; a valid call has it in its own place then.
bool is_alias(const at::Tensor& input, const at::Tensor& output) {
  auto* begin = static_cast<const std::byte*>(output.const_data_ptr());
  auto* own = static_cast<const std::byte*>(input.const_data_ptr());
  return begin <= own && own < begin + output.nbytes();
}

// What a party does in a call that all parties have made.
CollectivePlan plan_of(const Call& call, int64_t party, int64_t parties, bool ring) {
  if (call.op != Op::send && call.op != Op::recv)
    return {call, party, parties, ring ? AllReduceBy::slices : AllReduceBy::whole};
  return {{.op = Op::broadcast, .output = call.output, .input = call.input, .peer = 0}, party, parties};
}

std::unique_ptr<Exchange> make_exchange(const Rendezvous& rendezvous, bool ring) {
  std::vector<Side> sides;
  for (const Part& part : rendezvous.parts) {
    SHARD_REQUIRE(device_of(part.call) == device_of(rendezvous.parts[0].call), "threads",
                  "{}: rank {} has its tensors on {}, rank {} on {}; ranks must use one device",
                  describe(part.call), rendezvous.parts[0].rank, device_of(rendezvous.parts[0].call).str(), part.rank,
                  device_of(part.call).str());
    Side side{.plan = plan_of(part.call, std::ssize(sides), std::ssize(rendezvous.parts), ring)};
    if (part.call.input.defined())
      side.input = part.in_flight ? part.in_flight->snapshot()
                                  : static_cast<const std::byte*>(part.call.input.const_data_ptr());
    if (part.call.output.defined()) {
      side.output = static_cast<std::byte*>(part.call.output.mutable_data_ptr());
      side.output_numel = part.call.output.numel();
      side.in_place = part.call.op == Op::all_gather && is_alias(part.call.input, part.call.output);
      side.asks_whether_finite = part.call.finish.all_finite != nullptr;
    }
    sides.push_back(std::move(side));
  }
  const Call& call = rendezvous.parts[0].call;
  const c10::Device device = device_of(call);
  return std::make_unique<Exchange>(call, std::move(sides), ring, device_math(device));
}

// `not_done`: the output is still garbage.
void require_untouched(const Rendezvous& rendezvous, int64_t index, bool not_done) {
  const Part& part = rendezvous.parts[index];
  if (!part.in_flight) return;
  std::optional<std::string> found = part.in_flight->find_input_change(part.call);
  if (!found && not_done) found = part.in_flight->find_output_write(part.call);
  SHARD_REQUIRE(!found, "threads", "this rank {} of {} while it was in flight; wait for its Work first", *found,
                rendezvous.title(index));
}

// What has not taken effect until now.
void receive(const Rendezvous& rendezvous, int64_t index) {
  require_untouched(rendezvous, index, /*not_done=*/true);
  rendezvous.exchange->produce(index);
}

}  // namespace

World::World(std::vector<Parker*> parkers, const ThreadsOptions& options)
    : options_(options),
      size_(static_cast<int64_t>(parkers.size())),
      scheduler_(std::move(parkers), &caller_, options.schedule == ThreadsOptions::Schedule::serial, options.seed,
                 options.policy, [this] { end(-1, std::make_exception_ptr(Error(deadlock_message()))); }),
      open_calls_(size_),
      calls_made_(size_),
      blocked_in_(size_) {
  SHARD_REQUIRE(!options.policy || options.schedule == ThreadsOptions::Schedule::serial, "threads",
                "a policy chooses among ranks that run one at a time; set ThreadsOptions::schedule to serial");
  std::vector<int64_t> ranks(size_);
  for (int64_t rank = 0; rank < size_; ++rank) ranks[rank] = rank;
  everyone_ = std::make_shared<Group>(0, "world", std::move(ranks));
  if (!options.device || options.device->is_cpu()) return;
  given_.emplace(options.device->type());
  given_->record(current_stream(*options.device));
}

void World::start() {
  Lock lock(scheduler_);
  scheduler_.start();
}

Part World::make_part(const Group& group, int64_t rank, Call call) const {
  Part part;
  part.rank = rank;
  part.call = std::move(call);
  part.purpose = CallLabel::purpose();
  if (const c10::Device device = device_of(part.call); !device.is_cpu()) {
    part.ready.emplace(device.type());
    part.ready->record(current_stream(device));
  }
  const bool in_flight = options_.policy ? !part.ready : options_.completion != ThreadsOptions::Completion::eager;
  if (in_flight) part.in_flight.emplace(part.call);
  return part;
}

bool World::draw_late(const Group& group, int64_t sequence, int64_t rank) const {
  if (options_.policy) return false;
  if (options_.completion != ThreadsOptions::Completion::random)
    return options_.completion == ThreadsOptions::Completion::late;
  // From what the call is, not from when it comes, so that the draw does not depend on the schedule.
  uint64_t state = options_.seed;
  for (uint64_t value : {group.id, static_cast<uint64_t>(sequence), static_cast<uint64_t>(rank)})
    state = next_random(state) ^ value;
  return next_random(state) & 1;
}

// Where parts take effect one by one, the first to be done does not know what will be in the others.
bool World::finishes_sums() const {
  return options_.completion == ThreadsOptions::Completion::eager && !options_.policy;
}

World::Arrival World::arrive(Group& group, int64_t group_rank, Call call) {
  const int64_t rank = group.ranks[group_rank], index = part_of(call, group_rank);
  require_own_thread(this, rank);
  require_supported(call, options_.completion);
  pause_here();
  Part part = make_part(group, rank, std::move(call));
  Lock lock(scheduler_);
  if (ended_) throw WorldEnded();
  std::shared_ptr<Rendezvous> rendezvous = stream_of(group, part.call, group_rank).join(index);
  part.late = draw_late(group, rendezvous->sequence, rank);
  part.number = calls_made_[rank]++;
  rendezvous->parts[index] = std::move(part);
  // Before it counts as arrived: a rank on its way into `wait` would take it for a complete one, although
  // this call is mismatched, or its exchange cannot be made.
  if (const auto mismatch = find_mismatch(*rendezvous, index)) throw Error("[threads] " + *mismatch);
  if (rendezvous->arrived + 1 == std::ssize(rendezvous->parts))
    rendezvous->exchange = make_exchange(*rendezvous, options_.sum == ThreadsOptions::Sum::ring);
  rendezvous->parts[index].arrived = true;
  ++rendezvous->arrived;
  open_calls_[rank].push_back({rendezvous, index});
  if (rendezvous->complete()) complete(lock, *rendezvous, index);
  return {rendezvous, index};
}

// Called by the last to arrive.
void World::complete(Lock& lock, Rendezvous& rendezvous, int64_t part) {
  const bool eager = options_.completion == ThreadsOptions::Completion::eager;
  const bool alone = options_.schedule == ThreadsOptions::Schedule::serial;
  if (rendezvous.parts[static_cast<size_t>(part)].ready)
    queue_on_device(lock, rendezvous, part);
  else if (options_.policy)
    leave_to_policy(rendezvous);
  else if (!eager)
    complete_parts_not_late(lock, rendezvous);
  else if (alone || rendezvous.exchange->bytes() < kSharedBytesMin)
    help(lock, rendezvous, part);
  wake_waiting(rendezvous);
}

// The last to arrive queues everybody's work on its own stream, behind what each rank had queued when it called. From `done` on
// outputs are there and inputs have been read.
void World::queue_on_device(Lock& lock, Rendezvous& rendezvous, int64_t part) {
  lock.unlock();
  const c10::Device device = device_of(rendezvous.parts[static_cast<size_t>(part)].call);
  const c10::Stream stream = current_stream(device);
  for (const Part& each : rendezvous.parts) each.ready->block(stream);
  rendezvous.exchange->produce_all();
  rendezvous.done.emplace(device.type());
  rendezvous.done->record(stream);
  pause_here();  // others come to wait meanwhile
  lock.lock();
  for (Part& each : rendezvous.parts) each.done = true;
}

void World::complete_parts_not_late(Lock& lock, Rendezvous& rendezvous) {
  lock.unlock();
  for (size_t p = 0; p < rendezvous.parts.size(); ++p)
    if (!rendezvous.parts[p].late) rendezvous.exchange->produce(static_cast<int64_t>(p));
  lock.lock();
  for (Part& part : rendezvous.parts) part.done = !part.late;
}

// Each rank's part takes effect by itself, when the policy says so. What waits for it keeps the rendezvous alive.
void World::leave_to_policy(Rendezvous& rendezvous) {
  for (int64_t p = 0; p < std::ssize(rendezvous.parts); ++p) {
    const Part& part = rendezvous.parts[p];
    scheduler_.add_event({.actor = {SchedulePolicy::Actor::Kind::collective, part.rank, part.number},
                          .happen = [this, &rendezvous, p] { take_effect(rendezvous, p); },
                          .awaited = [&part] { return part.waiting; }});
  }
}

// On whichever thread came to where the policy chose it.
void World::take_effect(Rendezvous& rendezvous, int64_t index) {
  if (ended_) return;
  Part& part = rendezvous.parts[index];
  try {
    receive(rendezvous, index);
  } catch (...) {
    return end(part.rank, std::current_exception());
  }
  part.done = true;
  if (part.waiting) scheduler_.ready(part.rank);
}

// Takes a share of the work; whoever ends last, ends the call for all.
void World::help(Lock& lock, Rendezvous& rendezvous, int64_t part) {
  lock.unlock();
  const bool ended = rendezvous.exchange->run_tasks(part);
  lock.lock();
  if (!ended) return;
  for (Part& each : rendezvous.parts) each.done = true;
  wake_waiting(rendezvous);
}

void World::receive_late(Lock& lock, Rendezvous& rendezvous, int64_t part) {
  lock.unlock();
  receive(rendezvous, part);
  lock.lock();
  rendezvous.parts[part].done = true;
}

void World::wait(Rendezvous& rendezvous, int64_t index) {
  Part& part = rendezvous.parts[index];
  require_own_thread(this, part.rank);
  Lock lock(scheduler_);
  if (part.waited) return;
  if (rendezvous.complete()) scheduler_.yield(lock, part.rank);  // else it blocks, which chooses as well
  // On a device the last to arrive does all of it.
  const bool may_help = options_.completion == ThreadsOptions::Completion::eager && !part.ready && !options_.policy;
  bool helped = false;
  while (true) {
    if (ended_) throw WorldEnded();
    if (part.done) break;
    if (rendezvous.complete() && part.late) {
      receive_late(lock, rendezvous, index);
    } else if (rendezvous.complete() && may_help && !helped) {
      help(lock, rendezvous, index);
      helped = true;
    } else {
      part.waiting = true;
      blocked_in_[part.rank] = {&rendezvous, index};
      scheduler_.block(lock, part.rank);
      blocked_in_[part.rank] = {};
      part.waiting = false;
    }
  }
  lock.unlock();
  if (rendezvous.done) rendezvous.done->block(current_stream(device_of(part.call)));
  if (!part.late) require_untouched(rendezvous, index, /*not_done=*/false);
  if (part.call.finish.all_finite) *part.call.finish.all_finite = rendezvous.exchange->all_finite();
  lock.lock();
  close_call(rendezvous, index);
}

void World::close_call(const Rendezvous& rendezvous, int64_t index) {
  Part& part = const_cast<Rendezvous&>(rendezvous).parts[index];
  part.waited = true;
  // The tensors may be freed from now on, although other ranks have not waited yet.
  part.call.input.reset();
  part.call.output.reset();
  auto& open = open_calls_[part.rank];
  open.erase(std::find_if(open.begin(), open.end(), [&](const Arrival& call) {
    return call.rendezvous.get() == &rendezvous && call.part == index;
  }));
}

void World::wake_waiting(Rendezvous& rendezvous) {
  for (Part& part : rendezvous.parts)
    if (part.waiting) scheduler_.ready(part.rank);
}

std::shared_ptr<Group> World::join_group(uint64_t id, const std::string& name, const std::vector<int64_t>& ranks) {
  Lock lock(scheduler_);
  std::weak_ptr<Group>& known = groups_[id];
  std::shared_ptr<Group> group = known.lock();
  if (!group) known = group = std::make_shared<Group>(id, name, ranks);
  SHARD_REQUIRE(group->name == name, "threads",
                "ranks {} split off one group under two names, '{}' and '{}'; pass the same name on each",
                fmt::join(ranks, ","), group->name, name);
  return group;
}

void World::run(int64_t rank, const std::function<void()>& body) {
  current = {this, rank};
  std::optional<ScheduledWork::OnThisThread> decides;
  if (options_.policy)
    decides.emplace(std::shared_ptr<Scheduler>(shared_from_this(), &scheduler_), rank, SchedulePolicy::Actor{.rank = rank});
  try {
    const OwnStream own(options_.device, given_);
    body();
    require_no_open_calls(rank);
  } catch (...) {
    Lock lock(scheduler_);
    end(rank, std::current_exception());
  }
  current = {};
  Lock lock(scheduler_);
  scheduler_.finish(rank);
}

void World::require_no_open_calls(int64_t rank) {
  Lock lock(scheduler_);
  if (ended_ || open_calls_[rank].empty()) return;
  std::vector<std::string> titles;
  for (const Arrival& call : open_calls_[rank]) titles.push_back(call.rendezvous->title(call.part));
  throw Error(fmt::format("[threads] the body returned but never waited for {}; call Work::wait on every Work",
                          fmt::join(titles, "; ")));
}

// Under the lock. The first error counts; what follows from it does not.
void World::end(int64_t rank, std::exception_ptr error) {
  if (ended_) return;
  ended_ = true;
  error_ = std::move(error);
  error_rank_ = rank;
  for (int64_t r = 0; r < size_; ++r) scheduler_.ready(r);
}

std::string World::deadlock_message() const {
  std::string message = fmt::format("[threads] deadlock: none of the {} ranks can go on.", size_);
  for (int64_t rank = 0; rank < size_; ++rank) {
    if (scheduler_.finished(rank)) {
      message += fmt::format("\n  rank {} has returned", rank);
      continue;
    }
    const auto [rendezvous, index] = blocked_in_[rank];
    if (!rendezvous) {
      message += fmt::format("\n  rank {} waits for a thread of its own", rank);
      continue;
    }
    std::vector<int64_t> here, missing;
    for (const Part& part : rendezvous->parts) (part.arrived ? here : missing).push_back(part.rank);
    message += fmt::format("\n  rank {} waits in {}: called by {}, not by {}", rank, rendezvous->title(index),
                           fmt::join(here, ","), fmt::join(missing, ","));
  }
  return message + "\nAll ranks of a group must make the same calls in the same order, and wait for them.";
}

void World::join() {
  caller_.park();
  Lock lock(scheduler_);
  ended_ = true;
  for (auto& open : open_calls_) open.clear();
  const std::exception_ptr error = std::move(error_);
  lock.unlock();
  if (error) rethrow_with_rank(error, error_rank_, size_);
}

}  // namespace shardproof::threads
