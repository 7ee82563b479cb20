#include "properties/doubles/nccl_worlds.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "shardproof/base/check.h"
#include "shardproof/comm/decorated.h"

namespace nccl_worlds {
namespace {

using nccl_double::Api;
using shardproof::Call;
using shardproof::Comm;
using shardproof::DecoratedComm;
using shardproof::Op;
using shardproof::Work;

constexpr auto kLateKernel = std::chrono::microseconds(50);

class PressedWork final : public Work::State {
 public:
  PressedWork(Api& api, Call call, Work inner) : api_(api), call_(std::move(call)), inner_(std::move(inner)) {}
  void wait() override {
    inner_.wait();
    api_.synchronize(api_.current_stream());
  }

 private:
  Api& api_;
  Call call_;  // memory of the double is not reused in a stream's order, as a device's is
  Work inner_;
};

class PressedComm final : public DecoratedComm {
 public:
  PressedComm(Api& api, std::shared_ptr<Comm> inner, bool late_inputs)
      : DecoratedComm(std::move(inner)), api_(api), late_inputs_(late_inputs) {}

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override {
    return std::make_shared<PressedComm>(api_, std::move(group), late_inputs_);
  }
  Work start(Call call) override {
    if (late_inputs_ && call.input.defined() && call.input.numel() > 0) {
      const at::Tensor values = call.input.clone();
      void* const place = const_cast<void*>(call.input.const_data_ptr());
      std::memset(place, 0x7f, call.input.nbytes());
      api_.run_on(api_.current_stream(), [values, place, alive = call.input] {
        std::this_thread::sleep_for(kLateKernel);
        std::memcpy(place, values.const_data_ptr(), values.nbytes());
      });
    }
    return Work(std::make_shared<PressedWork>(api_, call, inner().issue(call)));
  }

  Api& api_;
  bool late_inputs_;
};

void on_threads(int64_t size, const std::function<void(int64_t)>& part) {
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank) threads.emplace_back(part, rank);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

World::World(int64_t size, Arrangement arrangement)
    : arrangement_(std::move(arrangement)), store_(std::make_shared<nccl_double::MemoryStore>()) {
  const auto cluster = std::make_shared<nccl_double::Cluster>(arrangement_.plan);
  for (int64_t rank = 0; rank < size; ++rank) {
    apis_.push_back(std::make_shared<Api>(cluster, rank));
    worlds_.push_back(std::make_unique<shardproof::NcclWorld>(rank, size, store_, apis_.back(), arrangement_.options));
  }
}

World::~World() {
  on_threads(std::ssize(worlds_), [this](int64_t rank) { worlds_[static_cast<size_t>(rank)].reset(); });
  for (const auto& api : apis_) EXPECT_EQ(api->leaks(), "");
}

std::vector<std::exception_ptr> World::run(const Body& body, int64_t ranks) {
  std::vector<std::exception_ptr> thrown(worlds_.size());
  on_threads(std::ssize(worlds_), [&](int64_t rank) {
    try {
      worlds_[static_cast<size_t>(rank)]->run(
          [&](std::shared_ptr<Comm> comm) {
            body(arrangement_.presses ? std::make_shared<PressedComm>(api(rank), std::move(comm), arrangement_.late_inputs)
                                      : std::move(comm));
          },
          ranks);
    } catch (...) {
      thrown[static_cast<size_t>(rank)] = std::current_exception();
    }
  });
  return thrown;
}

void run(int64_t size, const Arrangement& arrangement, const Body& body) {
  World world(size, arrangement);
  const std::vector<std::exception_ptr> thrown = world.run(body);
  for (const std::exception_ptr& each : thrown) EXPECT_EQ(each == nullptr, thrown[0] == nullptr);
  for (const std::exception_ptr& each : thrown)
    if (each) std::rethrow_exception(each);
}

std::vector<std::string> errors_of(int64_t size, const Arrangement& arrangement, const Body& body) {
  World world(size, arrangement);
  std::vector<std::string> errors;
  for (const std::exception_ptr& each : world.run(body)) {
    errors.emplace_back();
    try {
      if (each) std::rethrow_exception(each);
    } catch (const shardproof::Error& error) {
      errors.back() = error.what();
    }
  }
  return errors;
}

std::string error_of(int64_t size, const Arrangement& arrangement, const Body& body) {
  const std::vector<std::string> errors = errors_of(size, arrangement, body);
  for (const std::string& error : errors) EXPECT_NE(error, "") << "a rank ended well";
  return errors[0];
}

}  // namespace nccl_worlds
