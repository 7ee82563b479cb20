#include "shardproof/comm/nccl/nccl_store.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr auto kLook = std::chrono::milliseconds(5);
constexpr Seconds kGoodbye{2};

// c10d's store waits without end for the answer of a program that is none. What did not come back keeps its thread.
bool comes_back(std::function<void()> ask, Seconds deadline) {
  std::packaged_task<void()> task(std::move(ask));
  std::future<void> done = task.get_future();
  std::thread thread(std::move(task));
  if (done.wait_for(deadline) != std::future_status::ready) {
    thread.detach();
    return false;
  }
  thread.join();
  done.get();
  return true;
}

std::string this_process() {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  return fmt::format("process {} on {}", ::getpid(), host);
}

// Only rank 0, who says what the job is, writes before it knows whether it fits.
void take_place(NcclStore& store, const TcpStoreOptions& options, const std::string& where) {
  const std::string place = fmt::format("rank/{}", options.rank), self = this_process();
  bool taken = options.rank == 0 && store.count(place) != 1;
  if (options.rank == 0 && !taken) store.set("job", options.job);
  const auto until = Clock::now() + Seconds(options.timeout_seconds);
  std::optional<std::string> there;
  for (; !(there = store.get("job")); std::this_thread::sleep_for(kLook))
    SHARD_REQUIRE(Clock::now() < until, "nccl", "rank 0 did not come to the TCP store at {} within {} s; rank {} did", where,
                  options.timeout_seconds, options.rank);
  SHARD_REQUIRE(*there == options.job, "nccl",
                "the TCP store at {} is of another job, of which nothing was changed. Its rank 0 is of '{}', and rank {} here, "
                "{}, of '{}'. Give jobs that run at one time a MASTER_PORT each, and all ranks of a job the same command",
                where, *there, options.rank, self, options.job);
  if (options.rank != 0) taken = store.count(place) != 1;
  SHARD_REQUIRE(
      !taken, "nccl",
      "rank {} has come to the TCP store at {} already, as {}, and {} says that it is this rank too. Give each process "
      "a rank of its own, and jobs that run at one time a MASTER_PORT each",
      options.rank, where, store.get(place + "/who").value_or("a process that has just come"), self);
  store.set(place + "/who", self);
  store.count("came");
}

}  // namespace

class TcpStore::Impl {
 public:
  template <class Ask>
  auto asking(Ask ask, const char* advice = "") const {
    try {
      return ask();
    } catch (const c10::Error& error) {
      throw Error(fmt::format("[nccl] the TCP store at {}: {}{}", where_, error.what_without_backtrace(), advice));
    } catch (const std::exception& error) {
      throw Error(fmt::format("[nccl] the TCP store at {}: {}{}", where_, error.what(), advice));
    }
  }

  explicit Impl(TcpStoreOptions options)
      : options_(std::move(options)), where_(fmt::format("{}:{}", options_.host, options_.port)) {
    connect();
    // The store may be somebody else's too.
    named_ = c10::make_intrusive<c10d::PrefixStore>(options_.attempt.empty() ? "shardproof" : "shardproof/" + options_.attempt,
                                                    store_);
  }

  ~Impl() {
    if (!has_place) return;
    try {
      // A store whose host is gone may not answer either.
      comes_back([store = named_, serves = options_.serves] { leave(*store, serves); }, 2 * kGoodbye);
    } catch (const std::exception&) {  // who served it is gone
    }
  }
  Impl(const Impl&) = delete;

  c10d::Store& store() const { return *named_; }
  int64_t port() const { return store_->getPort(); }
  const std::string& where() const { return where_; }
  bool has_place = false;

 private:
  void connect() {
    c10d::TCPStoreOptions tcp;
    tcp.port = static_cast<uint16_t>(options_.port);
    tcp.isServer = options_.serves;
    tcp.waitWorkers = false;
    tcp.timeout = std::chrono::milliseconds(static_cast<int64_t>(options_.timeout_seconds * 1000));
    const auto made = std::make_shared<c10::intrusive_ptr<c10d::TCPStore>>();
    const auto make = [made, tcp, host = options_.host] { *made = c10::make_intrusive<c10d::TCPStore>(host, tcp); };
    const auto ask = [&] {
      // c10d's own deadline, where it has one, says more.
      if (!comes_back(make, Seconds(options_.timeout_seconds + 1)))
        throw Error(fmt::format("no answer within {} s, so what listens there is no store", options_.timeout_seconds));
    };
    asking(ask, ". MASTER_ADDR and MASTER_PORT must be rank 0's host and a port there that no other program or job has");
    store_ = std::move(*made);
  }

  static void leave(c10d::Store& store, bool serves) {
    store.add("left", 1);
    const auto until = Clock::now() + kGoodbye;
    while (serves && store.add("left", 0) < store.add("came", 0) && Clock::now() < until) std::this_thread::sleep_for(kLook);
  }

  const TcpStoreOptions options_;
  const std::string where_;
  c10::intrusive_ptr<c10d::TCPStore> store_;
  c10::intrusive_ptr<c10d::Store> named_;
};

TcpStore::TcpStore(const TcpStoreOptions& options) {
  SHARD_REQUIRE(options.port >= 0 && options.port < 65536 && (options.serves || options.port > 0), "nccl",
                "{} is no port of a TCP store", options.port);
  impl_ = std::make_unique<Impl>(options);
  if (options.job.empty()) return;
  take_place(*this, options, impl_->where());
  impl_->has_place = true;
}
TcpStore::~TcpStore() = default;

int64_t TcpStore::port() const {
  return impl_->port();
}

void TcpStore::set(const std::string& name, const std::string& text) {
  impl_->asking([&] { impl_->store().set(name, std::vector<uint8_t>(text.begin(), text.end())); });
}

std::optional<std::string> TcpStore::get(const std::string& name) {
  return impl_->asking([&]() -> std::optional<std::string> {
    if (!impl_->store().check({name})) return std::nullopt;
    const std::vector<uint8_t> bytes = impl_->store().get(name);
    return std::string(bytes.begin(), bytes.end());
  });
}

int64_t TcpStore::count(const std::string& name) {
  return impl_->asking([&] { return impl_->store().add(name, 1); });
}

void TcpStore::erase(const std::string& name) {
  impl_->asking([&] { impl_->store().deleteKey(name); });
}

}  // namespace shardproof
