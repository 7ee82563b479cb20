// The NCCL backend on its double: what each rank is told when a body, NCCL or the store fails.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "properties/doubles/nccl_worlds.h"
#include "properties/kit/expect_error.h"
#include "shardproof/base/check.h"

using namespace shardproof;

namespace {

// Of tensors of the host, which nothing writes after the wait.
const nccl_double::Plan kOnHost{.host_tensors = true};

void all_reduce_ones(Comm& comm) {
  at::Tensor tensor = at::ones({8});
  comm.all_reduce(tensor).wait();
}

// Two ranks whose worlds end when the test says so.
struct Two {
  using Ended = std::vector<std::string>;

  explicit Two(NcclOptions options, nccl_double::Plan plan = kOnHost) : cluster(std::make_shared<nccl_double::Cluster>(plan)) {
    for (int64_t rank = 0; rank < 2; ++rank) {
      apis.push_back(std::make_shared<nccl_double::Api>(cluster, rank));
      worlds.push_back(std::make_unique<NcclWorld>(rank, 2, store, apis.back(), options));
    }
  }
  void on_both(const std::function<void(size_t)>& part) const {
    std::thread other(part, 1);
    part(0);
    other.join();
  }
  // What each rank threw, in words. A rank that threw leaves its world, so that the other does not wait for it for ever.
  Ended run(const std::function<void(Comm&)>& body, int64_t ranks = 0) {
    Ended errors(2);
    on_both([&](size_t rank) {
      try {
        worlds[rank]->run([&](std::shared_ptr<Comm> comm) { body(*comm); }, ranks);
      } catch (const Error& error) {
        errors[rank] = error.what();
        worlds[rank].reset();
      }
    });
    return errors;
  }
  void close() {
    on_both([&](size_t rank) { worlds[rank].reset(); });
    for (const auto& api : apis) EXPECT_EQ(api->leaks(), "");
  }

  std::shared_ptr<nccl_double::Cluster> cluster;
  std::shared_ptr<nccl_double::MemoryStore> store = std::make_shared<nccl_double::MemoryStore>();
  std::vector<std::shared_ptr<nccl_double::Api>> apis;
  std::vector<std::unique_ptr<NcclWorld>> worlds;
};

}  // namespace

TEST(Nccl, who_closes_a_world_that_another_rank_keeps_does_not_wait_for_ever) {
  Two two({.timeout_seconds = 0.5});
  EXPECT_EQ(two.run(all_reduce_ones), Two::Ended(2));
  two.worlds[0].reset();  // a destroy that waits for ever ends this program: the double throws
  EXPECT_NE(two.worlds[1], nullptr);
  two.close();
}

TEST(Nccl, windows_give_back_their_handles_where_a_world_is_closed_and_lose_them_where_it_is_aborted) {
  const auto body = [](bool fails) {
    return [fails](Comm& comm) {
      const c10::DataPtr lent = comm.allocate(Op::all_gather, 64, at::kCPU);
      comm.barrier().wait();
      if (fails) throw Error("the body fails");
    };
  };
  for (const bool fails : {false, true}) {
    Two two({.buffers = NcclApi::Memory::symmetric, .timeout_seconds = 20}, {});
    for (const std::string& error : two.run(body(fails))) EXPECT_EQ(error.empty(), !fails) << error;
    two.close();
    for (const auto& api : two.apis) EXPECT_EQ(api->handles_lost(), fails ? 1 : 0) << "each of a window";
  }
}

TEST(Nccl, a_world_is_closed_and_not_aborted_after_a_body_without_some_of_its_ranks) {
  Two two({.buffers = NcclApi::Memory::symmetric, .timeout_seconds = 20}, {});
  EXPECT_EQ(two.run([](Comm& comm) {
    const c10::DataPtr lent = comm.allocate(Op::all_gather, 64, at::kCPU);
    comm.barrier().wait();
  }), Two::Ended(2));
  EXPECT_EQ(two.run([](Comm& comm) { EXPECT_EQ(comm.size(), 1); }, 1), Two::Ended(2));
  two.close();
  for (const auto& api : two.apis) EXPECT_EQ(api->handles_lost(), 0) << "an abort loses them";
}

TEST(Nccl, what_fails_on_a_rank_that_is_connected_reaches_one_that_is_not_yet) {
  Two two({.timeout_seconds = 2}, {.host_tensors = true, .slow_rank = 1});
  for (const std::string& error : two.run([](Comm& comm) {
         if (comm.rank() == 0) throw Error("no more paper");
         all_reduce_ones(comm);
       }))
    expect_says(error, {"rank 0 of 2", "no more paper"});
  two.close();
}

TEST(Nccl, a_rank_that_is_not_connected_while_others_are_ends_all_with_its_reason) {
  Two two({.timeout_seconds = 20}, {.host_tensors = true, .lost_rank = 1});
  for (const std::string& error : two.run(all_reduce_ones))
    expect_says(error, {"rank 1: NCCL failed in ncclCommInitRankConfig for 2 ranks"});
  two.close();
}

namespace {

// The GPU has no room for streams.
class Full final : public nccl_double::Api {
 public:
  using Api::Api;
  NcclApi::Stream make_stream() override { throw Error("[cuda] cudaStreamCreate: out of memory"); }
};

}  // namespace

TEST(Nccl, a_rank_that_fails_before_it_is_connected_tells_the_others) {
  Two two({.timeout_seconds = 2});
  two.apis[1] = std::make_shared<Full>(two.cluster, 1);
  two.worlds[1] = std::make_unique<NcclWorld>(1, 2, two.store, two.apis[1], NcclOptions{.timeout_seconds = 2});
  for (const std::string& error : two.run(all_reduce_ones)) expect_says(error, {"rank 1 of 2", "out of memory"});
  two.close();
}

TEST(Nccl, a_tcp_store_that_is_gone_is_named_with_its_address) {
  auto server = std::make_unique<TcpStore>(TcpStoreOptions{.serves = true, .timeout_seconds = 20});
  const int64_t port = server->port();
  TcpStore client({.port = port, .timeout_seconds = 1});
  server.reset();
  expect_error([&] { client.set("name", "text"), client.get("name"); }, {"[nccl] the TCP store at", fmt::format("{}", port)});
}

TEST(Nccl, the_kind_and_the_words_of_an_error_reach_every_rank) {
  const auto expect_everywhere = [](const auto& kind, const std::function<void()>& fail, const std::string& words) {
    nccl_worlds::World world(2, {.plan = kOnHost, .options = {.timeout_seconds = 20}});
    const auto thrown = world.run([&](std::shared_ptr<Comm> comm) {
      if (comm->rank() == 1) fail();
      all_reduce_ones(*comm);
    });
    for (const std::exception_ptr& each : thrown) {
      ASSERT_NE(each, nullptr);
      try {
        std::rethrow_exception(each);
      } catch (const std::decay_t<decltype(kind)>& error) {
        expect_says(error.what(), {"rank 1", words});
        EXPECT_EQ(std::string(error.what()).find("frame #"), std::string::npos) << "a trace of LibTorch's calls is left out";
      }
    }
  };
  expect_everywhere(
      BrokenInvariant(""), [] { throw BrokenInvariant("two heads"); }, "two heads");
  expect_everywhere(
      NonFiniteError(""), [] { throw NonFiniteError("a nan"); }, "a nan");
  expect_everywhere(
      Error(""), [] { TORCH_CHECK(false, "no such dim"); }, "no such dim");
  expect_everywhere(
      Error(""), [] { throw 7; }, "an exception without a message");
}

TEST(Nccl, a_body_for_more_ranks_than_there_are_is_refused) {
  const auto cluster = std::make_shared<nccl_double::Cluster>(kOnHost);
  const auto api = std::make_shared<nccl_double::Api>(cluster, 0);
  NcclWorld world(0, 1, std::make_shared<nccl_double::MemoryStore>(), api, {.timeout_seconds = 20});
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  expect_error([&] { world.run([](std::shared_ptr<Comm>) {}, 2); }, {"a body for 2 ranks cannot run on 1 processes"});
  world.run([](std::shared_ptr<Comm> comm) { all_reduce_ones(*comm); });
}

namespace {

// A store whose connection can be cut.
class CutStore final : public NcclStore {
 public:
  void set(const std::string& name, const std::string& text) override { whole().set(name, text); }
  std::optional<std::string> get(const std::string& name) override { return whole().get(name); }
  int64_t count(const std::string& name) override { return whole().count(name); }
  void erase(const std::string& name) override { whole().erase(name); }
  std::atomic<bool> is_cut = false;

 private:
  nccl_double::MemoryStore& whole() {
    if (is_cut) throw Error("the cable is cut");
    return inner_;
  }
  nccl_double::MemoryStore inner_;
};

// NCCL makes no communicator, and the store may be gone when it says so.
class Refusing final : public nccl_double::Api {
 public:
  Refusing(CutStore& store, bool cuts) : Api(std::make_shared<nccl_double::Cluster>(kOnHost), 0), store_(store), cuts_(cuts) {}
  NcclResult init_rank(Communicator&, int64_t, const UniqueId&, int64_t) override {
    store_.is_cut = cuts_;
    return NcclResult::invalid_usage;
  }

 private:
  CutStore& store_;
  const bool cuts_;
};

}  // namespace

TEST(Nccl, what_nccl_refuses_ends_the_world_with_its_reason_and_says_when_the_store_is_gone_too) {
  for (const bool cuts : {false, true}) {
    const auto store = std::make_shared<CutStore>();
    NcclWorld world(0, 1, store, std::make_shared<Refusing>(*store, cuts), {.timeout_seconds = 20});
    try {
      world.run([](std::shared_ptr<Comm> comm) { all_reduce_ones(*comm); });
      ADD_FAILURE() << "it went on";
    } catch (const WorldLostError& error) {
      if (cuts)
        expect_says(error.what(), {"the cable is cut"});
      else
        expect_says(error.what(), {"rank 0: NCCL refuses ncclCommInitRankConfig for 1 ranks"});
    }
  }
}
