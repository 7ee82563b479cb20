// Communicators and their calls, of the double.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "properties/doubles/nccl_double.h"
#include "properties/doubles/nccl_double_member.h"
#include "properties/doubles/nccl_double_streams.h"

namespace nccl_double {

struct Api::Parcel {
  Communicator communicator;
  NcclApi::Stream stream;
  int64_t peer, bytes;
  const std::byte* gives;  // of a send
  std::byte* takes;        // of a receive
};

namespace {

thread_local int64_t group_depth = 0;

std::byte* bytes_at(void* data) {
  return static_cast<std::byte*>(data);
}
const std::byte* bytes_at(const void* data) {
  return static_cast<const std::byte*>(data);
}

constexpr int kPoison = 0x7f;

}  // namespace

bool Api::abort_waits() {
  const std::lock_guard lock(graphs_->mutex);
  return graphs_->is_waited_for;
}

std::shared_ptr<void> Api::hold_graph() {
  const std::lock_guard lock(graphs_->mutex);
  ++graphs_->count;
  return {nullptr, [graphs = graphs_](void*) {
            {
              const std::lock_guard held(graphs->mutex);
              --graphs->count;
            }
            graphs->gone.notify_all();
          }};
}

NcclResult Api::returned() {
  const uint64_t number = cluster_->plan.seed + 31 * static_cast<uint64_t>(rank_) + static_cast<uint64_t>(returns_++);
  uint64_t mixed = number * 0x9e3779b97f4a7c15;
  mixed ^= mixed >> 31;
  return mixed % 3 == 0 ? NcclResult::in_progress : NcclResult::success;
}

std::string Cluster::new_id() {
  const std::lock_guard lock(mutex_);
  return fmt::format("id {}", ++ids_);
}

std::shared_ptr<Clique> Cluster::clique_of(const std::string& id, int64_t size) {
  const std::lock_guard lock(mutex_);
  auto& clique = cliques_[id];
  if (!clique) clique = std::make_shared<Clique>(size);
  return clique;
}

std::string Api::leaks() const {
  const std::lock_guard lock(mutex_);
  const auto open = std::count_if(members_.begin(), members_.end(), [](const auto& each) { return !each.second->aborted; });
  if (open + streams_.size() + events_.size() + memory_.size() + registered_.size() + operators_.size() == 1)
    return "";  // the caller's own stream
  return fmt::format("{} communicators, {} streams, {} events, {} blocks of memory, {} registrations, {} operators", open,
                     streams_.size() - 1, events_.size(), memory_.size(), registered_.size(), operators_.size());
}

std::shared_ptr<Api::Member> Api::member(Communicator communicator) const {
  const std::lock_guard lock(mutex_);
  const auto found = members_.find(communicator);
  if (found == members_.end() || found->second->aborted)
    throw std::logic_error("there is no such communicator, or it was destroyed or aborted");
  return found->second;
}

std::shared_ptr<Api::Member> Api::join(std::shared_ptr<Clique> clique, int64_t rank) {
  auto member = std::make_shared<Member>();
  member->clique = std::move(clique);
  member->rank = rank;
  // A few looks, so that ranks differ.
  if (const uint64_t seed = cluster_->plan.seed; seed > 0)
    member->late = std::chrono::microseconds((31 * seed + static_cast<uint64_t>(rank_)) % 4 * 100);
  if (cluster_->plan.slow_rank == rank_) member->late = std::chrono::milliseconds(100);
  ++member->clique->joined;
  const std::lock_guard lock(mutex_);
  ++communicators_made_;
  members_[member.get()] = member;
  return member;
}

NcclResult Api::get_unique_id(UniqueId& id) {
  const std::string text = cluster_->new_id();
  std::copy(text.begin(), text.end(), id.begin());
  return NcclResult::success;
}

NcclResult Api::init_rank(Communicator& communicator, int64_t size, const UniqueId& id, int64_t rank) {
  const auto clique = cluster_->clique_of(id.data(), size);
  const std::lock_guard lock(clique->mutex);
  if (clique->size != size || rank < 0 || rank >= size) return NcclResult::invalid_argument;
  const auto made = join(clique, rank);
  made->failed = cluster_->plan.lost_rank == rank_;
  communicator = made.get();
  return returned();
}

NcclResult Api::split(Communicator parent, int64_t color, int64_t key, Communicator& child) {
  const auto of = member(parent);
  const std::lock_guard lock(of->clique->mutex);
  if (color < 0) throw std::logic_error("a split without a color fails badly in NCCL");
  if (cluster_->plan.refused_rank == rank_ && ++splits_ > cluster_->plan.at_call) return NcclResult::system_error;
  if (!of->is_there() || of->child || of->not_queued > 0) return NcclResult::invalid_usage;
  of->child = &child;
  of->split_number = of->splits++;
  of->clique->splits[of->split_number].push_back({color, key, of->rank});
  return returned();
}

// Splits and windows make progress here, and only here.
NcclResult Api::async_error(Communicator communicator) {
  const auto of = member(communicator);
  const std::lock_guard lock(of->clique->mutex);
  if (of->failed) return NcclResult::remote_error;
  if (!of->clique->error.empty() || !of->refused.empty()) return NcclResult::invalid_usage;
  if (!of->is_there() || of->not_queued > 0) return NcclResult::in_progress;
  if (of->window_handle) {
    if (of->clique->windows[of->windows - 1].arrived < of->clique->size) return NcclResult::in_progress;
    *std::exchange(of->window_handle, nullptr) = of->window_memory;
  }
  if (!of->child) return NcclResult::success;
  std::vector<Clique::Wish> wishes = of->clique->splits[of->split_number];
  if (std::ssize(wishes) < of->clique->size) return NcclResult::in_progress;
  const auto own = std::find_if(wishes.begin(), wishes.end(), [&](const auto& wish) { return wish.rank == of->rank; });
  const int64_t color = own->color;
  std::erase_if(wishes, [&](const auto& wish) { return wish.color != color; });
  std::sort(wishes.begin(), wishes.end(),
            [](const auto& a, const auto& b) { return std::pair(a.key, a.rank) < std::pair(b.key, b.rank); });
  Communicator* const child = std::exchange(of->child, nullptr);
  auto& clique = of->clique->children[{of->split_number, color}];
  if (!clique) clique = std::make_shared<Clique>(std::ssize(wishes));
  const auto place = std::find_if(wishes.begin(), wishes.end(), [&](const auto& wish) { return wish.rank == of->rank; });
  const std::lock_guard child_lock(clique->mutex);
  *child = join(clique, place - wishes.begin()).get();
  return NcclResult::success;
}

std::string Api::error_text(NcclResult result, Communicator communicator) {
  std::string why;
  if (communicator) {
    const auto of = member(communicator);
    const std::lock_guard lock(of->clique->mutex);
    why = of->refused.empty() ? of->clique->error : of->refused;
    if (of->failed) why = "a peer is gone, says the double";
  }
  return fmt::format("NCCL result {}: {}", static_cast<int>(result), why);
}

void Api::abort(Communicator communicator) {
  const auto of = member(communicator);
  {
    std::unique_lock lock(graphs_->mutex);
    graphs_->is_waited_for = graphs_->count > 0;
    if (!graphs_->gone.wait_for(lock, kForEver, [this] { return graphs_->count == 0; }))
      throw std::logic_error("an abort waits for ever for a graph");
  }
  {
    const std::lock_guard lock(of->clique->mutex);
    of->aborted = true;
    ++of->clique->gone;
    // NCCL's thread stores what it was about to make.
    if (of->child) *std::exchange(of->child, nullptr) = join(std::make_shared<Clique>(1), 0).get();
  }
  of->clique->changed.notify_all();
  while (of->not_queued > 0) std::this_thread::yield();
  const std::lock_guard lock(mutex_);  // its registrations end with it, though not their handles (mended in NCCL 2.30)
  handles_lost_ += std::count_if(registered_.begin(), registered_.end(), [&](const auto& each) {
    return each.second.communicator == communicator && each.second.window >= 0;
  });
  std::erase_if(registered_, [&](const auto& each) { return each.second.communicator == communicator; });
  std::erase_if(operators_, [&](const auto& each) { return each.second.communicator == communicator; });
}

void Api::destroy(Communicator communicator) {
  const auto of = member(communicator);
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [memory, registration] : registered_)
      if (registration.communicator == communicator)
        throw std::logic_error("a communicator was destroyed that memory is registered with");
  }
  {
    std::unique_lock lock(of->clique->mutex);
    ++of->clique->gone;
    of->clique->changed.notify_all();
    if (!of->clique->changed.wait_for(lock, kForEver, [&] { return of->clique->gone >= of->clique->size; }))
      throw std::logic_error("a communicator is destroyed for ever, because a rank does not come to destroy it");
  }
  const std::lock_guard lock(mutex_);
  members_.erase(communicator);
}

NcclResult Api::check_call(Member& member, NcclApi::Stream stream, const char* op) {
  bool own = false;
  {
    const std::lock_guard lock(mutex_);
    own = streams_.count(stream) > 0;
  }
  const std::lock_guard lock(member.clique->mutex);
  if (!own) member.refused = fmt::format("{} on a stream of another device", op);
  if (!member.is_there() || member.child || member.window_handle || member.not_queued > 0)
    member.refused = fmt::format("{} while the communicator is in progress", op);
  return member.refused.empty() ? NcclResult::success : NcclResult::invalid_usage;
}

void Api::launch(std::shared_ptr<Member> member, NcclApi::Stream stream, std::function<void(Member&)> connects,
                 std::function<void(Member&)> task) {
  const Plan& plan = cluster_->plan;
  const int64_t number = calls_++;
  const bool due = number == plan.at_call;
  uint64_t mixed = (plan.seed + static_cast<uint64_t>(rank_) * 7919 + static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15;
  mixed ^= mixed >> 29;
  const auto late = std::chrono::microseconds(plan.seed > 0 ? mixed % static_cast<uint64_t>(plan.late_us) : 0);
  std::function<void()> kernel = [member, task, late, fails = due && plan.fails_rank == rank_,
                                  hangs = due && plan.hangs_rank == rank_] {
    if (late.count() > 0) std::this_thread::sleep_for(late);
    if (fails) member->failed = true;
    if (fails || hangs) return member->hang();
    task(*member);
  };
  ++member->not_queued;
  progress_->push([this, member, stream, kernel = std::move(kernel), connects = std::move(connects), late] {
    if (connects)
      connects(*member);
    else if (late.count() > 0)
      std::this_thread::sleep_for(late);
    if (!member->aborted) run_on(stream, kernel);
    --member->not_queued;
  });
}

NcclResult Api::collective(Communicator communicator, NcclApi::Stream stream, std::string what, const void* input,
                           int64_t input_bytes, void* output, int64_t output_bytes, Compute compute) {
  const auto of = member(communicator);
  if (group_depth > 0) throw std::logic_error("the double knows groups of sends and receives only");
  if (const NcclResult result = check_call(*of, stream, what.c_str()); result != NcclResult::success) return result;
  const int64_t number = of->collectives++;
  const std::string from = place_of(communicator, input), to = place_of(communicator, output);
  if (from != kNoWindow && to != kNoWindow) ++calls_in_windows_;
  what += fmt::format(" from {} to {}", from, to);
  constexpr int64_t kTreeBytesMax = 4096;
  const std::string algorithm = input_bytes <= kTreeBytesMax ? "tree" : "ring";
  std::function<void(Member&)> connects;
  if (of->algorithms.insert(algorithm).second) connects = [algorithm](Member& self) { self.connect(algorithm); };
  launch(of, stream, std::move(connects), [=](Member& self) {
    Clique& clique = *self.clique;
    std::unique_lock lock(clique.mutex);
    Clique::Slot& slot = clique.slots[number];
    if (slot.inputs.empty()) slot.what = what, slot.inputs.resize(static_cast<size_t>(clique.size));
    if (slot.what != what) clique.error = fmt::format("rank {} calls {}, another {}", self.rank, what, slot.what);
    slot.inputs[static_cast<size_t>(self.rank)] = Bytes(bytes_at(input), bytes_at(input) + input_bytes);
    std::memset(output, kPoison, static_cast<size_t>(output_bytes));
    ++slot.arrived;
    clique.changed.notify_all();
    if (!self.wait(lock, [&] { return slot.arrived == clique.size; })) return;
    compute(slot.inputs, bytes_at(output));
    if (++slot.left == clique.size) clique.slots.erase(number);
  });
  return returned();
}

NcclResult Api::all_gather(const void* input, void* output, int64_t bytes, Communicator communicator, NcclApi::Stream stream) {
  const int64_t size = member(communicator)->clique->size;
  return collective(communicator, stream, fmt::format("all_gather of {}", bytes), input, bytes, output, bytes * size,
                    [bytes](const std::vector<Bytes>& inputs, std::byte* place) {
                      for (const Bytes& each : inputs) std::memcpy(place, each.data(), each.size()), place += bytes;
                    });
}

NcclResult Api::broadcast(void* data, int64_t bytes, int64_t root, Communicator communicator, NcclApi::Stream stream) {
  return collective(communicator, stream, fmt::format("broadcast of {} from {}", bytes, root), data, bytes, data, bytes,
                    [root](const std::vector<Bytes>& inputs, std::byte* place) {
                      const Bytes& given = inputs[static_cast<size_t>(root)];
                      std::memcpy(place, given.data(), given.size());
                    });
}

std::vector<Api::Parcel>& Api::group() {
  static thread_local std::vector<Parcel> parcels;
  return parcels;
}

NcclResult Api::group_start() {
  ++group_depth;
  return NcclResult::success;
}

NcclResult Api::group_end() {
  if (group_depth == 0) return NcclResult::invalid_usage;
  if (--group_depth > 0 || group().empty()) return NcclResult::success;
  return ship(std::exchange(group(), {}));
}

NcclResult Api::parcel(Parcel parcel) {
  const auto of = member(parcel.communicator);
  if (const NcclResult result = check_call(*of, parcel.stream, "a message"); result != NcclResult::success) return result;
  if (parcel.peer < 0 || parcel.peer >= of->clique->size) return NcclResult::invalid_argument;
  if (group_depth == 0) return ship({parcel});
  group().push_back(parcel);
  return NcclResult::success;
}

NcclResult Api::send(const void* data, int64_t bytes, int64_t peer, Communicator communicator, NcclApi::Stream stream) {
  return parcel({communicator, stream, peer, bytes, bytes_at(data), nullptr});
}

NcclResult Api::recv(void* data, int64_t bytes, int64_t peer, Communicator communicator, NcclApi::Stream stream) {
  return parcel({communicator, stream, peer, bytes, nullptr, bytes_at(data)});
}

// All sends of a group go out, then its receives come in; messages between two ranks meet in order, whatever is in them.
NcclResult Api::ship(std::vector<Parcel> parcels) {
  const Parcel& first = parcels.front();
  for (const Parcel& each : parcels)
    if (each.communicator != first.communicator || each.stream != first.stream)
      throw std::logic_error("the double knows groups on one communicator and stream only");
  const auto of = member(first.communicator);
  std::set<int64_t> to, from;
  for (const Parcel& each : parcels) {
    if (each.peer == of->rank) continue;
    auto& connected = each.gives ? of->sends_to : of->takes_from;
    if (connected.insert(each.peer).second) (each.gives ? to : from).insert(each.peer);
  }
  std::function<void(Member&)> connects;
  if (!to.empty() || !from.empty()) connects = [to, from](Member& self) { self.connect(to, from); };
  launch(of, first.stream, std::move(connects), [parcels](Member& self) {
    Clique& clique = *self.clique;
    std::unique_lock lock(clique.mutex);
    std::vector<std::shared_ptr<Clique::Message>> sent;
    for (const Parcel& each : parcels) {
      if (each.takes) std::memset(each.takes, kPoison, static_cast<size_t>(each.bytes));
      if (!each.gives) continue;
      sent.push_back(std::make_shared<Clique::Message>(Clique::Message{Bytes(each.gives, each.gives + each.bytes)}));
      clique.mail[{self.rank, each.peer}].push_back(sent.back());
    }
    clique.changed.notify_all();
    for (const Parcel& each : parcels) {
      if (!each.takes) continue;
      auto& box = clique.mail[{each.peer, self.rank}];
      if (!self.wait(lock, [&] { return !box.empty(); })) return;
      const auto message = box.front();
      box.pop_front();
      if (std::ssize(message->data) != each.bytes) {
        clique.error = fmt::format("rank {} sends {} bytes to rank {}, which takes {}", each.peer, message->data.size(),
                                   self.rank, each.bytes);
        clique.changed.notify_all();
        self.wait(lock, [] { return false; });
        return;
      }
      std::memcpy(each.takes, message->data.data(), message->data.size());
      message->taken = true;
      clique.changed.notify_all();
    }
    self.wait(lock, [&] { return std::all_of(sent.begin(), sent.end(), [](const auto& message) { return message->taken; }); });
  });
  return returned();
}

}  // namespace nccl_double
