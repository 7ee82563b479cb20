#include "shardproof/comm/nccl/nccl_store.h"

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "shardproof/base/check.h"

namespace shardproof {

class TcpStore::Impl {
 public:
  template <class Ask>
  auto asking(Ask ask) const {
    try {
      return ask();
    } catch (const c10::Error& error) {
      throw Error(fmt::format("[nccl] the TCP store at {}: {}", where_, error.what_without_backtrace()));
    } catch (const std::exception& error) {
      throw Error(fmt::format("[nccl] the TCP store at {}: {}", where_, error.what()));
    }
  }

  explicit Impl(const TcpStoreOptions& options) : where_(fmt::format("{}:{}", options.host, options.port)) {
    c10d::TCPStoreOptions tcp;
    tcp.port = static_cast<uint16_t>(options.port);
    tcp.isServer = options.serves;
    tcp.waitWorkers = false;
    tcp.timeout = std::chrono::milliseconds(static_cast<int64_t>(options.timeout_seconds * 1000));
    asking([&] {
      store_ = c10::make_intrusive<c10d::TCPStore>(options.host, tcp);
      // The store may be somebody else's too.
      named_ = c10::make_intrusive<c10d::PrefixStore>("shardproof", store_);
    });
  }

  c10d::Store& store() const { return *named_; }
  int64_t port() const { return store_->getPort(); }

 private:
  std::string where_;
  c10::intrusive_ptr<c10d::TCPStore> store_;
  c10::intrusive_ptr<c10d::Store> named_;
};

TcpStore::TcpStore(const TcpStoreOptions& options) {
  SHARD_REQUIRE(options.port >= 0 && options.port < 65536 && (options.serves || options.port > 0), "nccl",
                "{} is no port of a TCP store", options.port);
  impl_ = std::make_unique<Impl>(options);
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
