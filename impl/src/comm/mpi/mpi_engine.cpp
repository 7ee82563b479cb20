#include "comm/mpi/mpi_engine.h"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

#include "internal/base/disk_work.h"
#include "comm/mpi/mpi_start.h"
#include "shardproof/base/check.h"
#include "internal/base/call_label.h"

namespace shardproof::mpi {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// How often the background thread looks, and how often a waiting rank looks before it sleeps between looks, so briefly that the
// next look comes soon, and so that who has work to do gets the processor.
constexpr auto kBackground = 300us;
constexpr int64_t kLooksEager = 300, kLooksCrowded = 30;
constexpr auto kSleep = 10us;
constexpr auto kLongWait = 5ms;
constexpr auto kLongSleep = 100us;
// From this on a wait is told to the watch.
constexpr auto kPublish = 20ms;

}  // namespace

Engine::Engine(const MpiOptions& options) : options_(options) {
  int initialized = 0, provided = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialized);
  SHARD_REQUIRE(!initialized, "mpi", "MPI is already in use in this process; make one MpiWorld, once");
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  SHARD_REQUIRE(provided >= MPI_THREAD_SERIALIZED, "mpi",
                "this MPI cannot be called from several threads; use one built with them");
  int rank = 0, size = 1, local = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm host = MPI_COMM_NULL, own = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host), "MPI_Comm_split_type");
  MPI_Comm_size(host, &local);
  MPI_Comm_free(&host);
  crowded_ = local >= static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  calls_ = std::make_unique<process::Calls>(rank, size, options_.flight_calls_max);
  if (size > 1) {
    watch_ = std::make_unique<ProcessWatch>(WatchOptions{.rank = rank,
                                                         .world = size,
                                                         .one_host = local == size,
                                                         .timeout_s = options_.timeout_seconds,
                                                         .status = [this] { return status(); },
                                                         .on_end = [this](const std::string& why) { on_lost(why); }});
    std::string addresses = rank == 0 ? watch_->listen() : "";
    addresses.resize(4096);
    check_mpi(MPI_Bcast(addresses.data(), static_cast<int>(addresses.size()), MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
    watch_->connect(addresses.c_str());
  }
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &own), "MPI_Comm_dup");
  std::vector<int64_t> everyone(static_cast<size_t>(size));
  for (int64_t r = 0; r < size; ++r) everyone[static_cast<size_t>(r)] = r;
  world_ = std::make_shared<Group>(own, "world", everyone, 0);
  background_ = std::thread([this] { run_in_background(); });
}

void Engine::shut_down(bool cleanly) {
  if (watch_ && cleanly && !lost_) watch_->leave();
  stop_ = true;
  {
    const std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  if (background_.joinable()) background_.join();
  watch_.reset();
  // Without the others MPI_Finalize would wait for ever.
  if (!cleanly || lost_) return;
  world_->close();
  MPI_Finalize();
}

std::string Engine::lost() const {
  return lost_ && watch_ ? watch_->ended() : "";
}

void Engine::on_lost(const std::string& why) {
  lost_ = true;
  write_record(why);
}

void Engine::write_record(const std::string& why) {
  const std::string problem = calls_->write(options_.flight_directory, why);
  if (!problem.empty()) fmt::print(stderr, "shardproof: {}\n", problem);
}

void Engine::require_alive(const std::string& doing) {
  if (lost_) throw WorldLostError(fmt::format("[mpi] {}: {}", doing, lost()));
}

std::shared_ptr<Operation> Engine::start(const std::shared_ptr<Group>& group, Call call) {
  std::shared_ptr<Operation> operation;
  {
    const std::lock_guard lock(mutex_);
    if (lost_)
      throw WorldLostError(fmt::format("[mpi] {}; this rank was about to make {}", lost(),
                                       process::title_of(call, group->next_sequence(), group->name(), CallLabel::purpose())));
    SHARD_REQUIRE(!abandoned_ || group == world_, "mpi", "{} on '{}' after this rank's body failed", describe(call),
                  group->name());
    try {
      operation = start_operation(group, std::move(call));
    } catch (const BrokenInvariant& error) {
      break_world(error);  // some ranks may have been told of the call
      throw;
    }
    calls_->begin(operation);
    pending_.push_back(operation);
    progress();
  }
  if (pending_count_ > 0) wake_.notify_one();
  return operation;
}

// Under the lock. When MPI fails, nothing more is advanced: it may be half done. The world ends for all ranks, since others
// would wait for this one.
void Engine::progress() {
  if (is_broken_) return;
  try {
    advance_pending();
  } catch (const std::exception& error) {
    break_world(error);
    if (!watch_) throw;
  }
}

void Engine::break_world(const std::exception& error) {
  is_broken_ = true;
  if (watch_) watch_->end(fmt::format("rank {}: {}", world_->rank(), error.what()));
}

void Engine::advance_pending() {
  Group* polled = nullptr;
  for (auto at = pending_.begin(); at != pending_.end();) {
    Operation& operation = **at;
    if (&operation.group() != polled) (polled = &operation.group())->poll();
    if (!operation.advance()) {
      ++at;
      continue;
    }
    calls_->mark(operation, operation.done() ? FlightCall::State::done : FlightCall::State::failed);
    at = pending_.erase(at);
  }
  pending_count_ = static_cast<int64_t>(pending_.size());
}

void Engine::pause(Clock::time_point since, int64_t& looks) const {
  if (++looks < (crowded_ ? kLooksCrowded : kLooksEager)) return;
  std::this_thread::sleep_for(Clock::now() - since < kLongWait ? kSleep : kLongSleep);
}

void Engine::wait(Operation& operation) {
  // Else the kernel would round each sleep of this thread up by 50 us.
  [[maybe_unused]] static thread_local const int exact_sleeps = ::prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  const auto since = Clock::now();
  auto publish_at = since + kPublish;
  int64_t looks = 0;
  struct Waiting {
    std::atomic<int64_t>& count;
    explicit Waiting(std::atomic<int64_t>& waiters) : count(waiters) { ++count; }
    ~Waiting() { --count; }
  } const waiting(waiters_);
  bool published = false;
  const auto retract = [&] {
    if (!published) return;
    const std::lock_guard lock(status_mutex_);
    waiting_ = {};
  };
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (!operation.done() && operation.error().empty()) progress();
      if (operation.done() || !operation.error().empty()) break;
      if (Clock::now() > publish_at) {
        publish_at = Clock::now() + kPublish;
        published = true;
        publish_wait(operation, std::chrono::duration<double>(Clock::now() - since).count());
      }
    }
    if (lost_) break;
    pause(since, looks);
  }
  retract();
  finish_wait(operation);
}

void Engine::finish_wait(Operation& operation) {
  {
    const std::lock_guard lock(mutex_);
    calls_->end(operation);
    if (operation.done()) return;
    if (!operation.error().empty()) {
      calls_->mark(operation, FlightCall::State::failed);
      const std::string error = "[mpi] " + operation.error();
      if (operation.relayed()) throw RelayedError(error);
      throw Error(error);
    }
  }
  throw WorldLostError(fmt::format("[mpi] {}; this rank was in {}", lost(), operation.title()));
}

// Under the lock.
void Engine::publish_wait(const Operation& operation, double waited_s) {
  const std::lock_guard lock(status_mutex_);
  waiting_ = {.waiting = true, .waited_s = waited_s, .missing = operation.missing(), .text = operation.title()};
  waiting_since_ = Clock::now();
}

WatchStatus Engine::status() const {
  const std::lock_guard lock(status_mutex_);
  WatchStatus now = waiting_;
  if (now.waiting) {
    now.waited_s += std::chrono::duration<double>(Clock::now() - waiting_since_).count();
  } else {
    now.text = calls_->last();
    now.saving = DiskWork::is_under_way();
  }
  return now;
}

void Engine::run_in_background() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait(lock, [this] { return stop_ || pending_count_ > 0; });
    lock.unlock();
    std::this_thread::sleep_for(kBackground);
    lock.lock();
    if (waiters_ > 0 || lost_ || stop_) continue;
    progress();
  }
}

std::shared_ptr<Group> Engine::split(Group& parent, int64_t color, int64_t key, const std::string& name, uint64_t id,
                                     std::vector<int64_t> world_ranks) {
  const std::lock_guard lock(mutex_);
  MPI_Comm made = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split(parent.comm(), color < 0 ? MPI_UNDEFINED : static_cast<int>(color), static_cast<int>(key), &made),
            "MPI_Comm_split");
  if (made == MPI_COMM_NULL) return nullptr;
  auto group = std::make_shared<Group>(made, name, std::move(world_ranks), id);
  groups_.push_back(group);
  return group;
}

std::byte* Engine::share(Group& group, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  MPI_Comm host = MPI_COMM_NULL;
  int local = 0;
  check_mpi(MPI_Comm_split_type(group.comm(), MPI_COMM_TYPE_SHARED, static_cast<int>(group.rank()), MPI_INFO_NULL, &host),
            "MPI_Comm_split_type");
  MPI_Comm_size(host, &local);
  MPI_Comm_free(&host);
  int everywhere = local == group.size();
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &everywhere, 1, MPI_INT, MPI_MIN, group.comm()), "MPI_Allreduce");
  if (!everywhere) return nullptr;
  constexpr MPI_Aint kAlignment = 64;
  MPI_Win window = MPI_WIN_NULL;
  void* own = nullptr;
  const MPI_Aint size = group.rank() == 0 ? bytes + kAlignment : 0;
  check_mpi(MPI_Win_allocate_shared(size, 1, MPI_INFO_NULL, group.comm(), &own, &window), "MPI_Win_allocate_shared");
  group.add_window(window);
  MPI_Aint found = 0;
  int unit = 1;
  void* base = nullptr;
  check_mpi(MPI_Win_shared_query(window, 0, &found, &unit, &base), "MPI_Win_shared_query");
  // Each process maps it at whole pages, so the first aligned byte is the same one for all.
  auto* aligned = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(base) + kAlignment - 1) / kAlignment * kAlignment);
  if (group.rank() == 0) std::memset(aligned, 0, static_cast<size_t>(bytes));
  return aligned;
}

void Engine::abandon(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(abandoned_, true)) return;
  const std::string text = why.substr(0, kBodyBytesMax);
  for (const auto& group : groups_) {
    group->abandon();
    for (int64_t peer = 0; peer < group->size(); ++peer)
      if (peer != group->rank())
        group->post(peer, {.kind = Kind::abandon, .body_bytes = static_cast<int64_t>(text.size())},
                    reinterpret_cast<const std::byte*>(text.data()));
  }
}

void Engine::drain() {
  const auto everybody = [this](auto is_so) {
    if (is_broken_) return false;
    for (const auto& group : groups_) {
      group->poll();
      for (int64_t peer = 0; peer < group->size(); ++peer)
        if (peer != group->rank() && !is_so(*group, peer)) return false;
    }
    return true;
  };
  const auto until = [&](auto is_so) {
    const auto since = Clock::now();
    for (int64_t looks = 0;; pause(since, looks)) {
      require_alive("draining after a failure");
      const std::lock_guard lock(mutex_);
      progress();
      if (everybody(is_so)) return;
    }
  };
  // What both sides have agreed on still moves; of the rest nothing was sent.
  until([](Group& group, int64_t peer) { return group.abandoned(peer) != nullptr; });
  const auto since = Clock::now();
  for (int64_t looks = 0; pending_count_ > 0; pause(since, looks)) {
    require_alive("draining after a failure");
    const std::lock_guard lock(mutex_);
    progress();
  }
  {
    const std::lock_guard lock(mutex_);
    for (const auto& group : groups_)
      for (int64_t peer = 0; peer < group->size(); ++peer)
        if (peer != group->rank()) group->post(peer, {.kind = Kind::drained});
  }
  until([](Group& group, int64_t peer) { return group.drained(peer) && group.all_posts_sent(); });
  const std::lock_guard lock(mutex_);
  calls_->forget();
  abandoned_ = false;
}

void Engine::close_groups() {
  const std::lock_guard lock(mutex_);
  for (const auto& group : groups_) group->close();
  groups_.clear();
}

}  // namespace shardproof::mpi
