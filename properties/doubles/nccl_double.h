// A double of NCCL and of CUDA's streams in memory: ranks are threads of the test, device memory is the process', a stream is a
// queue with a thread of its own, and sums are added by the CPU's arithmetic. It completes late where
// a seed says so, refuses what NCCL refuses, and fails or hangs on demand. As NCCL does, it may return success while the
// communicator is in progress, gives its work to the stream later, from a thread of its own, writes pointers and handles late,
// and waits in an abort for what is in progress and for graphs. Ranks leave the making of a communicator at other times. The
// first call of an algorithm waits for all ranks, and the first messages between two ranks for both, which must then send and
// receive alike. A destroy waits for all ranks. A communicator that is aborted loses the handles of its windows.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "shardproof/comm/nccl/nccl_api.h"
#include "shardproof/comm/nccl/nccl_store.h"

namespace nccl_double {

using shardproof::NcclApi;
using shardproof::NcclResult;
using shardproof::Reduce;

struct Plan {
  uint64_t seed = 0;  // above 0: each call completes late, by up to `late_us`
  int64_t late_us = 100;
  int64_t look_us = 0;        // asking whether an event is complete takes so long
  bool host_tensors = false;  // tensors are not on the device, and have to be copied there and back
  bool no_kernels = false;    // that could add sums
  bool no_windows = false;    // as before NCCL 2.27
  int64_t fails_rank = -1;    // this rank's call on a communicator number `at_call` is an asynchronous error,
  int64_t hangs_rank = -1;    // or is never done,
  int64_t refused_rank = -1;  // or its split number `at_call` is refused
  int64_t at_call = 0;
  int64_t lost_rank = -1;  // the world's first communicator does not come about on this rank, and does on the others,
  int64_t slow_rank = -1;  // or each comes about here a tenth of a second later
};

using Bytes = std::vector<std::byte>;
class StreamQueue;

// Below any limit of a test. Who waits for so long waits for ever.
constexpr std::chrono::seconds kForEver{60};

// What all ranks of one communicator share.
struct Clique {
  struct Slot {        // one collective
    std::string what;  // of who was first
    std::vector<Bytes> inputs;
    int64_t arrived = 0, left = 0;
  };
  struct Message {
    Bytes data;
    bool taken = false;
  };
  struct Wish {
    int64_t color, key, rank;
  };
  struct Window {  // one that ranks make together
    int64_t bytes, arrived = 0;
  };

  explicit Clique(int64_t size) : size(size) {}

  const int64_t size;
  std::mutex mutex;
  std::condition_variable changed;
  int64_t joined = 0, gone = 0;           // so many ranks are here, and have destroyed or aborted it
  std::map<std::string, int64_t> called;  // so many have called an algorithm
  std::string error;                      // found by any rank, for all
  // What ranks tell each other when they connect, by (phase, distance), sender and receiver: whether it sends, and receives.
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::deque<std::pair<bool, bool>>> setups;
  std::map<int64_t, Slot> slots;
  std::map<std::pair<int64_t, int64_t>, std::deque<std::shared_ptr<Message>>> mail;  // by sender and receiver
  std::map<int64_t, std::vector<Wish>> splits;                                       // by number of the split
  std::map<std::pair<int64_t, int64_t>, std::shared_ptr<Clique>> children;           // by number of the split and color
  std::map<int64_t, Window> windows;                                                 // by number
};

class Cluster {
 public:
  explicit Cluster(Plan plan) : plan(plan) {}
  std::shared_ptr<Clique> clique_of(const std::string& id, int64_t size);
  std::string new_id();

  const Plan plan;

 private:
  std::mutex mutex_;
  int64_t ids_ = 0;
  std::map<std::string, std::shared_ptr<Clique>> cliques_;
};

// One rank's.
class Api : public NcclApi {
 public:
  Api(std::shared_ptr<Cluster> cluster, int64_t rank);
  ~Api() override;

  // The host waits for all that the stream was given so far.
  void synchronize(NcclApi::Stream stream);
  // The caller's own from now on; one of `make_stream`.
  void set_current_stream(NcclApi::Stream stream);
  // Of the caller's own: a kernel, in the stream's order.
  void run_on(NcclApi::Stream stream, std::function<void()> kernel);
  // What was made and never released, in words; "" for nothing.
  std::string leaks() const;
  int64_t communicators_made() const { return communicators_made_; }
  int64_t registrations() const { return registrations_; }
  // Collectives whose input and output lay in windows, and sums that multiplied their terms.
  int64_t calls_in_windows() const { return calls_in_windows_; }
  int64_t premultiplied_calls() const { return premultiplied_calls_; }
  // Sums that NCCL's symmetric kernels would take: from window to window, without a factor, of a dtype that they have.
  int64_t symmetric_sums() const { return symmetric_sums_; }
  // Handles of windows that communicators had when they were aborted.
  int64_t handles_lost() const { return handles_lost_; }
  // Pieces of memory that were allocated and not released.
  int64_t pieces_of_memory();
  // While it lives, a graph has this rank's communicators. Where an abort waits for it too long, that is an error.
  std::shared_ptr<void> hold_graph();
  bool abort_waits();  // for one

  void use_device() override {}
  NcclApi::Stream make_stream() override;
  void destroy_stream(NcclApi::Stream stream) override;
  NcclApi::Stream current_stream() override;
  Event make_event() override;
  void destroy_event(Event event) override;
  void record(Event event, NcclApi::Stream stream) override;
  void wait(NcclApi::Stream stream, Event event) override;
  bool is_complete(Event event) override;
  void synchronize() override;
  void copy(void* target, const void* source, int64_t bytes, NcclApi::Stream stream) override;
  std::string why_no_sums() override { return cluster_->plan.no_kernels ? "this double has no kernels" : ""; }
  void reduce(at::ScalarType dtype, Reduce op, const std::vector<const std::byte*>& terms, int64_t count, std::byte* target,
              NcclApi::Stream stream) override;
  std::string why_no_windows() override { return cluster_->plan.no_windows ? "this double has no windows" : ""; }
  bool is_on_device(const at::Tensor&) override { return !cluster_->plan.host_tensors; }
  bool is_device(c10::Device device) override { return device.is_cpu() && !cluster_->plan.host_tensors; }
  void* allocate(int64_t bytes, Memory kind) override;
  void release(void* memory, Memory kind) override;

  NcclResult get_unique_id(UniqueId& id) override;
  NcclResult init_rank(Communicator& communicator, int64_t size, const UniqueId& id, int64_t rank) override;
  NcclResult split(Communicator parent, int64_t color, int64_t key, Communicator& child) override;
  NcclResult async_error(Communicator communicator) override;
  std::string error_text(NcclResult result, Communicator communicator) override;
  void abort(Communicator communicator) override;
  void destroy(Communicator communicator) override;
  NcclResult group_start() override;
  NcclResult group_end() override;
  NcclResult send(const void* data, int64_t bytes, int64_t peer, Communicator communicator, NcclApi::Stream stream) override;
  NcclResult recv(void* data, int64_t bytes, int64_t peer, Communicator communicator, NcclApi::Stream stream) override;
  NcclResult all_gather(const void* input, void* output, int64_t bytes, Communicator communicator,
                        NcclApi::Stream stream) override;
  NcclResult broadcast(void* data, int64_t bytes, int64_t root, Communicator communicator, NcclApi::Stream stream) override;
  NcclResult all_reduce(const void* input, void* output, int64_t count, at::ScalarType dtype, Operator op,
                        Communicator communicator, NcclApi::Stream stream) override;
  NcclResult reduce_scatter(const void* input, void* output, int64_t count, at::ScalarType dtype, Operator op,
                            Communicator communicator, NcclApi::Stream stream) override;
  NcclResult create_premultiplied_sum(Operator& op, double factor, at::ScalarType dtype, Communicator communicator) override;
  NcclResult destroy_operator(Operator op, Communicator communicator) override;
  NcclResult register_memory(Communicator communicator, void* memory, int64_t bytes, Memory kind, void*& handle) override;
  NcclResult deregister_memory(Communicator communicator, void* handle, Memory kind) override;

 private:
  struct Member;  // this rank in a clique
  struct Parcel;  // a send or receive
  struct Graphs {  // that somebody holds
    std::mutex mutex;
    std::condition_variable gone;
    int64_t count = 0;
    bool is_waited_for = false;
  };
  struct Registration {
    Communicator communicator;
    int64_t bytes;
    int64_t window;  // its number in the communicator; -1: not symmetric
  };
  struct Block {
    Memory kind;
    int64_t bytes;
  };
  struct OwnOperator {
    double factor;
    at::ScalarType dtype;
    Communicator communicator;
  };
  // How a term enters a sum.
  struct Adding {
    Reduce op = Reduce::sum;
    double factor = 1;
  };
  using Compute = std::function<void(const std::vector<Bytes>& inputs, std::byte* output)>;

  // Success or in progress, drawn: what the communicator says next is no part of it.
  NcclResult returned();
  bool is_of_copies(const void* memory) const;
  static std::vector<Parcel>& group();
  std::shared_ptr<Member> member(Communicator communicator) const;
  std::shared_ptr<Member> join(std::shared_ptr<Clique> clique, int64_t rank);
  NcclResult check_call(Member& member, NcclApi::Stream stream, const char* op);
  NcclResult collective(Communicator communicator, NcclApi::Stream stream, std::string what, const void* input,
                        int64_t input_bytes, void* output, int64_t output_bytes, Compute compute);
  // "window 3 + 512" or "no window": what ranks must agree on.
  std::string place_of(Communicator communicator, const void* data) const;
  static void add_backwards(const std::vector<Bytes>& inputs, int64_t offset, int64_t count, at::ScalarType dtype,
                            Adding adding, std::byte* place);
  Adding adding(Operator op, at::ScalarType dtype, Communicator communicator);
  void count_symmetric_sum(const void* input, const void* output, at::ScalarType dtype, Operator op, Communicator communicator);
  NcclResult parcel(Parcel parcel);
  NcclResult ship(std::vector<Parcel> parcels);
  // `connects` comes first, where there is one, and not on the stream.
  void launch(std::shared_ptr<Member> member, NcclApi::Stream stream, std::function<void(Member&)> connects,
              std::function<void(Member&)> task);

  const std::shared_ptr<Cluster> cluster_;
  const int64_t rank_;
  mutable std::mutex mutex_;
  std::map<Communicator, std::shared_ptr<Member>> members_;
  std::set<NcclApi::Stream> streams_;
  std::set<Event> events_;
  std::map<void*, Block> memory_;
  NcclApi::Stream first_ = nullptr;  // current at first
  std::map<void*, Registration> registered_;  // by memory, which is the handle too
  std::map<Operator, OwnOperator> operators_;
  NcclApi::Stream current_ = nullptr;
  int64_t calls_ = 0, communicators_made_ = 0, registrations_ = 0, calls_in_windows_ = 0, premultiplied_calls_ = 0,
          symmetric_sums_ = 0, operators_made_ = 0, returns_ = 0, splits_ = 0, handles_lost_ = 0;
  const std::shared_ptr<Graphs> graphs_ = std::make_shared<Graphs>();
  std::unique_ptr<StreamQueue> progress_;  // NCCL's own thread
};

// For ranks as threads.
class MemoryStore final : public shardproof::NcclStore {
 public:
  void set(const std::string& name, const std::string& text) override;
  std::optional<std::string> get(const std::string& name) override;
  int64_t count(const std::string& name) override;
  void erase(const std::string& name) override;
  size_t size() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::string> texts_;
  std::map<std::string, int64_t> counts_;
};

}  // namespace nccl_double
