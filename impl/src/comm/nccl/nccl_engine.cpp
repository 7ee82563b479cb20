#include "comm/nccl/nccl_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/split_group.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device_graph.h"
#include "internal/device/streams.h"

namespace shardproof::nccl {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// A host that waits looks so often before it sleeps between looks.
constexpr int64_t kEagerLooks = 50;
constexpr auto kSleep = 50us;
constexpr auto kLookForEnd = 10ms;
// Who closes waits so long for the others, because a destroy of NCCL would wait for ever.
constexpr double kPatienceSeconds = 10;

void pause(int64_t& looks) {
  if (++looks < kEagerLooks)
    std::this_thread::yield();
  else
    std::this_thread::sleep_for(kSleep);
}

double seconds_since(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

}  // namespace

Engine::Engine(int64_t rank, int64_t size, std::shared_ptr<NcclStore> store, std::shared_ptr<NcclApi> api, NcclOptions options)
    : rank_(rank),
      size_(size),
      store_(std::move(store)),
      api_(std::move(api)),
      options_(std::move(options)),
      calls_(rank, size, options_.flight_calls_max),
      watch_(rank, store_) {
  api_->use_device();
  watching_ = std::thread([this] { run_watch(); });
}

Engine::~Engine() {
  {
    const std::lock_guard lock(wake_mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  watching_.join();
  const bool is_well = !ended_ && flying_.empty() && std::uncaught_exceptions() == 0;
  const std::chrono::duration<double> patience(std::min(kPatienceSeconds, options_.timeout_seconds));
  if (is_well && (!connected_ || watch_.all_close(size_, patience)))
    close_groups();
  else
    abort_groups();
}

void Engine::begin(int64_t body) {
  const std::lock_guard lock(mutex_);
  require_world("the beginning of a body");
  {
    const std::lock_guard state(state_mutex_);
    body_ = body;
    end_ = {};
    ended_ = false;
  }
  api_->use_device();
  if (!connected_) connect();
  for (const auto& group : groups_)
    for (auto& [colors_and_keys, splits] : group->splits) splits.used = 0;
}

// The first rank's unique id makes the world's first lane; the others are split from it.
void Engine::connect() {
  const std::string name = fmt::format("id/{}", body_);
  const std::string doing = fmt::format("ncclCommInitRankConfig for {} ranks", size_);
  NcclApi::UniqueId id{};
  if (rank_ == 0) {
    finish(nullptr, api_->get_unique_id(id), "ncclGetUniqueId");
    store_->set(name, std::string(id.data(), id.size()));
  }
  Pulse pulse;
  int64_t looks = 0;
  for (std::optional<std::string> text; !(text = store_->get(name)); pause(looks)) {
    require_alive(doing);
    require_sign_of_life(0, pulse, doing);
  }
  const std::string text = store_->get(name).value();
  std::copy_n(text.begin(), std::min(text.size(), id.size()), id.begin());
  world_ = std::make_shared<Group>();
  world_->rank = rank_;
  world_->world_ranks.resize(static_cast<size_t>(size_));
  std::iota(world_->world_ranks.begin(), world_->world_ranks.end(), 0);
  groups_ = {world_};
  Lane& first = world_->lane(LaneKind::gathers);
  first.stream = api_->make_stream();
  const NcclResult result = api_->init_rank(first.communicator, size_, id, rank_);
  finish(first.communicator, result, doing);
  open_lanes(*world_, first.communicator, 0, rank_, 1);
  connected_ = true;
}

void Engine::open_lanes(Group& group, NcclApi::Communicator parent, int64_t color, int64_t key, size_t first_lane) {
  for (size_t i = first_lane; i < kLanes; ++i) {
    Lane& lane = group.lanes[i];
    lane.stream = api_->make_stream();
    finish(parent, api_->split(parent, color, key, lane.communicator), "ncclCommSplit");
    finish(lane.communicator, NcclResult::success, "ncclCommSplit");
  }
}

std::shared_ptr<Group> Engine::split(Group& parent, const std::vector<int64_t>& colors_and_keys) {
  const auto lock = hold("a split");
  Group::Splits& splits = parent.splits[colors_and_keys];
  if (splits.used < splits.groups.size()) return splits.groups[splits.used++];
  ++splits.used;
  int64_t earlier = 0;
  for (const auto& [other, made] : parent.splits) earlier += static_cast<int64_t>(made.groups.size());
  const SplitGroup made =
      split_group(colors_and_keys, parent.rank, parent.world_ranks, parent.id, static_cast<uint64_t>(earlier));
  auto group = std::make_shared<Group>();
  group->rank = made.rank, group->world_ranks = made.world_ranks, group->id = made.id;
  // Who aborts finds what NCCL has made of it by then.
  groups_.push_back(group);
  // Ranks without a color have one of their own: where a split fails, NCCL writes to the communicator that they would not have.
  // Nothing is on its way on this lane of any parent: its last call was the exchange of colors, which all ranks have waited
  // for.
  open_lanes(*group, parent.lane(LaneKind::gathers).communicator, made.color < 0 ? parent.size() : made.color, made.rank, 0);
  splits.groups.push_back(made.color < 0 ? nullptr : group);
  return splits.groups.back();
}

std::shared_ptr<Operation> Engine::start(std::shared_ptr<Group> group, std::shared_ptr<const FlightGroup> flight, Call call) {
  api_->use_device();
  auto operation = std::make_shared<Operation>(api_, group, std::move(flight), std::move(call));
  const auto lock = hold(operation->title());
  SHARD_REQUIRE(!is_capturing() || !operation->blocks, "nccl",
                "{} inside of a captured step lets the host wait, and a replay would not", operation->title());
  operation->sequence = operation->is_message() ? group->message_count++ : group->collectives++;
  require_alive(operation->title());
  calls_.begin(operation);
  {
    const std::lock_guard state(state_mutex_);
    collectives_[group->id] = group->collectives;
  }
  if (!operation->is_message()) {
    launch({operation});
    return operation;
  }
  group->messages.push_back(operation);
  // As many sends as receives: most likely an exchange among all ranks, which begins at once. Others begin when waited for.
  const auto sends = std::count_if(group->messages.begin(), group->messages.end(),
                                   [](const auto& message) { return message->call.op == Op::send; });
  if (2 * sends == std::ssize(group->messages)) launch_messages(*group);
  return operation;
}

void Engine::launch_messages(Group& group) {
  const auto messages = std::exchange(group.messages, {});
  if (!messages.empty()) launch(messages);
}

// Behind what the caller's stream has been given so far.
void Engine::launch(const std::vector<std::shared_ptr<Operation>>& operations) {
  Operation& first = *operations.front();
  Lane& lane = first.lane();
  const Event given(api_);
  api_->record(given.get(), api_->current_stream());
  api_->wait(lane.stream, given.get());
  Issue issue(*api_, options_,
              [&](NcclApi::Communicator communicator, NcclResult result) { finish(communicator, result, first.title()); });
  if (first.is_message())
    issue.messages(operations);
  else
    issue.collective(first);
  for (const auto& operation : operations) {
    api_->record(operation->done.get(), lane.stream);
    operation->launched = true;
    operation->begun = Clock::now();
  }
  const std::lock_guard state(state_mutex_);
  // An event of a capture is never over, and CUDA lets nobody ask for it.
  if (!is_capturing()) return void(flying_.insert(flying_.end(), operations.begin(), operations.end()));
  for (const auto& operation : operations) {
    operation->complete = operation->is_captured = true;
    calls_.mark(*operation, FlightCall::State::done);
  }
}

void Engine::finish(NcclApi::Communicator communicator, NcclResult result, const std::string& doing) {
  const auto since = Clock::now();
  const char* what = "refuses";
  const auto may_be_under_way = [&] { return result == NcclResult::success || result == NcclResult::in_progress; };
  // A call may return success while its communicator is at work, which takes no further call then.
  for (int64_t looks = 0; communicator && may_be_under_way(); pause(looks)) {
    result = api_->async_error(communicator);
    if (result == NcclResult::success) return;
    what = "failed in";
    require_alive(doing);
    if (seconds_since(since) > options_.timeout_seconds && result == NcclResult::in_progress)
      end(body_, {true, fmt::format("rank {}: {} is not over after {} s{}", rank_, doing, options_.timeout_seconds,
                                    unheard(world_ ? world_->world_ranks : std::vector<int64_t>{}))});
  }
  if (may_be_under_way()) return;
  end(body_, {true, fmt::format("rank {}: NCCL {} {}: {}", rank_, what, doing, api_->error_text(result, communicator))});
  require_alive(doing);
}

void Engine::wait(Operation& operation) {
  if (operation.waited) return;
  const std::string title = operation.title();
  {
    const auto lock = hold(title);
    api_->use_device();
    require_alive(title);
    if (!operation.launched) launch_messages(*operation.group);
    const bool is_left = operation.is_captured && !is_capturing();  // by a capture that failed
    if (!operation.blocks && !is_left) api_->wait(api_->current_stream(), operation.done.get());
  }
  if (operation.blocks) {
    block_until(operation.done.get(), title);
    copy_back(operation);
  }
  const auto lock = hold(title);
  for (const LaneMemory::Block& block : operation.blocks_taken) operation.lane().memory.give_back(block);
  operation.blocks_taken.clear();
  operation.landings.clear();
  const std::lock_guard state(state_mutex_);
  // Whatever reuses their memory comes behind in the caller's stream.
  for (const at::Tensor* tensor : {&operation.call.input, &operation.call.output})
    if (tensor->defined()) use_here(tensor->storage().data_ptr());
  operation.call.input = operation.call.output = at::Tensor();
  calls_.end(operation);
}

void Engine::copy_back(Operation& operation) {
  if (operation.landings.empty()) return;
  const Event landed(api_);
  {
    const auto lock = hold(operation.title());
    require_alive(operation.title());
    for (const auto& landing : operation.landings)
      api_->copy(landing.staged.memory, landing.device.memory, landing.bytes, operation.lane().stream);
    api_->record(landed.get(), operation.lane().stream);
  }
  block_until(landed.get(), operation.title());
  for (const auto& landing : operation.landings)
    std::memcpy(landing.host, landing.staged.memory, static_cast<size_t>(landing.bytes));
}

void Engine::block_until(NcclApi::Event event, const std::string& doing) {
  for (int64_t looks = 0; !api_->is_complete(event); pause(looks)) require_alive(doing);
  require_alive(doing);  // an abort ends what was waited for, too
}

void Engine::drain() {
  std::list<std::shared_ptr<Operation>> flying;
  {
    const std::lock_guard state(state_mutex_);
    flying = flying_;
  }
  for (const auto& operation : flying) block_until(operation->done.get(), operation->title());
  collect_complete();
  require_alive("the end of the body");
}

void Engine::collect_complete() {
  const std::lock_guard state(state_mutex_);
  flying_.remove_if([this](const auto& operation) {
    if (!api_->is_complete(operation->done.get())) return false;
    operation->complete = true;
    calls_.mark(*operation, FlightCall::State::done);
    return true;
  });
}

c10::DataPtr Engine::allocate(Group& group, Op op, int64_t bytes, c10::Device device) {
  if (options_.buffers == NcclApi::Memory::plain || bytes == 0 || group.size() == 1 || !api_->is_device(device)) return {};
  const std::string doing =
      fmt::format("the registration of {} bytes for {}; leave --registered-buffers out", bytes, to_string(op));
  const auto lock = hold(doing);
  api_->use_device();
  require_alive(doing);
  Lane& lane = group.lane(lane_of(op));
  return lane.buffers.take(api_, lane.communicator, bytes, options_.buffers, device,
                           [&](NcclApi::Communicator communicator, NcclResult result) { finish(communicator, result, doing); });
}

int64_t Engine::lent_buffers() {
  const std::lock_guard lock(mutex_);
  int64_t lent = 0;
  for (const auto& group : groups_)
    for (const Lane& lane : group->lanes) lent += lane.buffers.lent();
  return lent;
}

void Engine::abandon(const std::string& why) {
  end(body_, {false, fmt::format("rank {} failed: {}", rank_, why)});
}

void Engine::abort_groups() {
  const std::lock_guard lock(mutex_);
  api_->use_device();
  abort_lanes();
  forget_groups();
}

void Engine::close_groups() {
  const std::lock_guard lock(mutex_);
  api_->use_device();
  forget_groups();
}

// Aborted lanes have no communicator any more. Kernels of the caller, and replays, may still use memory of the lanes.
void Engine::forget_groups() {
  api_->synchronize();
  for (const auto& group : groups_) {
    group->messages.clear();
    group->splits.clear();
    for (Lane& lane : group->lanes) {
      if (lane.stream) api_->destroy_stream(lane.stream);
      lane.memory.close(*api_, lane.communicator);
      lane.buffers.close(lane.communicator);
      if (lane.communicator) api_->destroy(lane.communicator);
      lane.stream = nullptr, lane.communicator = nullptr;
    }
  }
  groups_.clear();
  world_ = nullptr;
  connected_ = false;
  const std::lock_guard state(state_mutex_);
  calls_.forget();
  flying_.clear(), collectives_.clear();
}

std::unique_lock<std::timed_mutex> Engine::hold(const std::string& doing) {
  std::unique_lock lock(mutex_, std::defer_lock);
  while (!lock.try_lock_for(kLookForEnd)) require_alive(doing);
  return lock;
}

void Engine::require_alive(const std::string& doing) {
  if (!ended_) return;
  require_world(doing);
  const std::lock_guard state(state_mutex_);
  throw RelayedError(fmt::format("[nccl] {}; this rank was in {}", end_.text, doing));
}

void Engine::require_world(const std::string& doing) {
  const std::lock_guard state(state_mutex_);
  if (ended_ && end_.lost) throw WorldLostError(fmt::format("[nccl] {}; this rank was in {}", end_.text, doing));
}

}  // namespace shardproof::nccl
