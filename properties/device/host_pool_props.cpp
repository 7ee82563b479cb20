// The pool of host memory: what tensors that lie in it hold, and what the process pays for it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <barrier>
#include <fstream>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "properties/kit/expect_error.h"
#include "properties/kit/held_cases.h"
#include "shardproof/base/check.h"
#include "shardproof/device/host_pool.h"

using namespace shardproof;

extern "C" int __asan_address_is_poisoned(const volatile void* address) __attribute__((weak));  // null without it

namespace {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;

// Children of fork() lack the threads within operators, and would wait for them.
[[maybe_unused]] const bool kOneThread = (at::set_num_threads(1), true);

int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(key)) return std::stoll(line.substr(key.size())) * kKiB;
  return 0;
}

at::Tensor tensor_of(int64_t bytes) {
  return at::empty({bytes}, at::kByte);
}

// A tensor that is full of one number, as long as nobody else writes there.
struct Marked {
  at::Tensor tensor;
  uint8_t mark;
  bool holds() const { return tensor.eq(mark).all().item<bool>(); }
};

Marked marked(int64_t bytes, uint8_t mark) {
  return {at::full({bytes}, mark, at::kByte), mark};
}

// From small ones, which the pool leaves to the system, to some that are large. Most of the sizes are no whole pages.
rc::Gen<int64_t> some_bytes() {
  return rc::gen::oneOf(rc::gen::inRange<int64_t>(1, 2 * kHostPoolBlockBytesMin), rc::gen::inRange<int64_t>(1, 3 * kMiB));
}

RC_GTEST_PROP(HostPool, no_tensor_changes_another_one, ()) {
  use_host_pool();
  std::vector<Marked> tensors;
  const auto steps = *rc::gen::inRange(5, 40);
  uint8_t mark = 0;
  for (int step = 0; step < steps; ++step) {
    if (!tensors.empty() && *rc::gen::inRange(0, 2) == 0) {
      const auto which = *rc::gen::inRange<size_t>(0, tensors.size());
      RC_ASSERT(tensors[which].holds());
      tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(which));
    } else {
      tensors.push_back(marked(*some_bytes(), ++mark));
      RC_ASSERT(reinterpret_cast<uintptr_t>(tensors.back().tensor.data_ptr()) % 64 == 0);
    }
  }
  for (const Marked& tensor : tensors) RC_ASSERT(tensor.holds());
}

TEST(HostPool, threads_that_free_each_others_tensors_do_not_disturb_each_other) {
  use_host_pool();
  const int64_t used = host_pool_bytes().used;
  constexpr size_t kPlaces = 16;
  struct Place {
    std::mutex mutex;
    std::optional<Marked> tensor;
  };
  std::vector<Place> places(kPlaces);
  std::atomic<int> changed = 0;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed)
    threads.emplace_back([&, seed] {
      std::minstd_rand random(seed + 1);
      for (int step = 0; step < 1500; ++step) {
        const auto bytes = static_cast<int64_t>(random() % (512 * kKiB) + 1);
        Marked fresh = marked(bytes, static_cast<uint8_t>(random()));
        Place& place = places[random() % kPlaces];
        const std::lock_guard lock(place.mutex);
        if (place.tensor && !place.tensor->holds()) ++changed;
        place.tensor = std::move(fresh);  // frees a tensor that another thread may have made
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(changed, 0);
  places = std::vector<Place>();
  EXPECT_EQ(host_pool_bytes().used, used);
}

// So fast that threads meet in the pool, whatever else the machine does.
TEST(HostPool, threads_that_do_nothing_but_take_and_free_get_blocks_of_their_own) {
  use_host_pool();
  const int64_t used = host_pool_bytes().used;
  constexpr int kThreads = 4;
  std::atomic<int> changed = 0;
  std::barrier begin(kThreads);
  std::vector<std::thread> threads;
  for (int64_t seed = 1; seed <= kThreads; ++seed)
    threads.emplace_back([&, seed] {
      std::minstd_rand random(static_cast<unsigned>(seed));
      std::array<at::Tensor, 16> blocks;
      const auto mark = [](const at::Tensor& block) -> volatile int64_t& {
        return *block.mutable_data_ptr<int64_t>();
      };
      begin.arrive_and_wait();
      for (size_t step = 0; step < 200'000; ++step) {
        at::Tensor& block = blocks[step % blocks.size()];
        if (block.defined() && mark(block) != seed) ++changed;
        block = at::empty({kHostPoolBlockBytesMin / 8 + static_cast<int64_t>(random() % (64 * kKiB))}, at::kLong);
        mark(block) = seed;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(changed, 0);
  EXPECT_EQ(host_pool_bytes().used, used);
}

TEST(HostPool, small_tensors_are_the_systems) {
  use_host_pool();
  const int64_t used = host_pool_bytes().used;
  const at::Tensor small = tensor_of(kHostPoolBlockBytesMin - 1);
  EXPECT_EQ(host_pool_bytes().used, used);
  const at::Tensor large = tensor_of(kHostPoolBlockBytesMin);
  EXPECT_EQ(host_pool_bytes().used, used + kHostPoolBlockBytesMin);
}

TEST(HostPool, counts_whole_pages_and_the_most_of_them) {
  use_host_pool();
  const int64_t page = sysconf(_SC_PAGESIZE), used = host_pool_bytes().used;
  {
    const at::Tensor a = tensor_of(20 * page + 1), b = tensor_of(30 * page);
    EXPECT_EQ(host_pool_bytes().used, used + 51 * page);
  }
  const HostPoolBytes bytes = host_pool_bytes();
  EXPECT_EQ(bytes.used, used);
  EXPECT_GE(bytes.used_max, used + 51 * page);
  EXPECT_GE(bytes.kept, 51 * page);
}

TEST(HostPool, a_storage_that_grows_keeps_its_values) {
  use_host_pool();
  at::Tensor tensor = at::arange(1000);  // the system's
  tensor.resize_({kMiB});                // the pool's
  EXPECT_TRUE(tensor.narrow(0, 0, 1000).equal(at::arange(1000)));
  tensor.resize_({3 * kMiB});
  EXPECT_TRUE(tensor.narrow(0, 0, 1000).equal(at::arange(1000)));
}

TEST(HostPool, takes_and_frees_raw_memory_of_both_kinds) {
  use_host_pool();
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  const int64_t used = host_pool_bytes().used;
  for (const size_t bytes : {size_t{100}, size_t{1} << 20}) {
    void* const data = allocator->raw_allocate(bytes);
    std::fill_n(static_cast<char*>(data), bytes, 'x');
    void* const copy = allocator->clone(data, bytes).release_context();
    EXPECT_TRUE(std::equal(static_cast<char*>(data), static_cast<char*>(data) + bytes, static_cast<char*>(copy)));
    allocator->raw_deallocate(copy);
    allocator->raw_deallocate(data);
  }
  allocator->raw_deallocate(nullptr);
  EXPECT_EQ(host_pool_bytes().used, used);
}

TEST(HostPool, what_was_allocated_before_it_is_freed_as_it_was) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that has no pool yet
  EXPECT_EXIT(
      {
        at::Tensor before = at::ones({kMiB});
        use_host_pool();
        const at::Tensor after = before + 1;
        before.reset();
        const bool holds = after.eq(2).all().item<bool>();
        std::exit(holds && host_pool_bytes().used == 4 * kMiB ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

// The sizes of a step, freed in another order than they were made.
void step_of_tensors() {
  std::vector<at::Tensor> kept;
  for (int64_t layer = 1; layer <= 8; ++layer) {
    kept.push_back(tensor_of(layer * 300 * kKiB));
    const at::Tensor temporary = tensor_of(layer * 500 * kKiB), other = tensor_of(2 * kMiB);
    kept.push_back(tensor_of(layer * 70 * kKiB));
  }
  while (!kept.empty()) {
    const at::Tensor gradient = tensor_of(kMiB);
    kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(kept.size() / 2));
  }
}

TEST(HostPool, later_steps_take_no_more_memory_than_the_first) {
  use_host_pool();
  const auto all = [] { return host_pool_bytes().used + host_pool_bytes().kept; };
  step_of_tensors();
  const int64_t after_first = all();
  for (int step = 0; step < 50; ++step) step_of_tensors();
  EXPECT_EQ(all(), after_first);
}

TEST(HostPool, blocks_that_lie_beside_each_other_serve_one_that_is_as_large_as_all) {
  use_host_pool();
  const auto all = [] { return host_pool_bytes().used + host_pool_bytes().kept; };
  { const at::Tensor everything = tensor_of(64 * kMiB); }  // one range, unless other tensors lie within
  const int64_t before = all();
  std::vector<at::Tensor> parts;
  for (int part = 0; part < 64; ++part) parts.push_back(tensor_of(kMiB));
  for (size_t part = 0; part < parts.size(); part += 2) parts[part].reset();
  for (size_t part = 1; part < parts.size(); part += 2) parts[part].reset();
  const at::Tensor everything = tensor_of(64 * kMiB);
  EXPECT_EQ(all(), before);
}

TEST(HostPool, the_most_that_tensors_need_is_about_what_the_process_pays) {
  use_host_pool();
  { const at::Tensor warm = at::zeros({kMiB}); }
  trim_host_pool();
  const int64_t before = status_bytes("VmRSS:");
  for (int round = 0; round < 4; ++round) const at::Tensor tensor = at::zeros({64 * kMiB}, at::kByte);
  const int64_t kept = status_bytes("VmRSS:") - before;
  // An eighth for AddressSanitizer, which has a byte of its own for eight.
  EXPECT_NEAR(static_cast<double>(kept), 64.0 * kMiB, 12.0 * kMiB) << "the memory is kept, once";
  trim_host_pool();
  EXPECT_NEAR(static_cast<double>(status_bytes("VmRSS:") - before), 0, 12.0 * kMiB) << "the memory is the system's again";
  const Marked again = marked(64 * kMiB, 7);
  EXPECT_TRUE(again.holds());
}

TEST(HostPool, with_address_sanitizer_freed_memory_may_not_be_read) {
  if (!__asan_address_is_poisoned) GTEST_SKIP() << "this build has no AddressSanitizer; `ci/sanitize asan` has";
  use_host_pool();
  at::Tensor tensor = tensor_of(kMiB);
  const auto* const data = static_cast<const char*>(tensor.const_data_ptr());
  EXPECT_FALSE(__asan_address_is_poisoned(data)) << "a tensor lies there";
  tensor.reset();
  EXPECT_TRUE(__asan_address_is_poisoned(data));
  EXPECT_TRUE(__asan_address_is_poisoned(data + kMiB - 1));
}

TEST(HostPool, what_no_machine_has_is_refused_as_ever) {
  use_host_pool();
  const HostPoolBytes before = host_pool_bytes();
  EXPECT_THROW(tensor_of(int64_t{1} << 60), c10::Error);
  EXPECT_EQ(host_pool_bytes().used, before.used);
  EXPECT_EQ(host_pool_bytes().kept, before.kept);
}

// Where the process may have few addresses more than it has.
void limit_addresses(int64_t more) {
  const auto bytes = static_cast<rlim_t>(status_bytes("VmSize:") + more);
  const rlimit limit{bytes, bytes};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
}

// Where the process may write to little more memory than it has.
void limit_memory(int64_t more) {
  const auto bytes = static_cast<rlim_t>(status_bytes("VmData:") + more);
  const rlimit limit{bytes, bytes};
  ASSERT_EQ(setrlimit(RLIMIT_DATA, &limit), 0);
}

TEST(HostPool, memory_that_the_system_refuses_costs_no_addresses) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that has no pool yet
  EXPECT_EXIT(
      {
        limit_memory(64 * kMiB);
        use_host_pool();
        const int64_t before = status_bytes("VmSize:");
        int refused = 0;
        for (int i = 0; i < 100; ++i) try {
            tensor_of(1000 * kMiB);
          } catch (const c10::Error&) {
            ++refused;
          }
        const bool is_small = status_bytes("VmSize:") - before < 1000 * kMiB;
        const bool holds = marked(8 * kMiB, 7).holds() && host_pool_bytes().used_max >= 8 * kMiB;
        std::exit(refused != 100 ? 4 : !is_small ? 5 : !holds ? 6 : 0);
      },
      testing::ExitedWithCode(0), "");
}

TEST(HostPool, makes_do_with_the_addresses_that_the_limits_leave) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that has no pool yet
  EXPECT_EXIT(
      {
        limit_addresses(400 * kMiB);
        use_host_pool();
        std::vector<Marked> tensors;
        for (uint8_t i = 0; i < 30; ++i) tensors.push_back(marked(10 * kMiB, i));
        bool holds = host_pool_bytes().used > 0;
        for (const Marked& tensor : tensors) holds &= tensor.holds();
        std::thread([&] { holds &= marked(kMiB, 1).holds(); }).join();  // whose stack needs addresses as well
        try {
          const at::Tensor too_large = tensor_of(300 * kMiB);
          holds = false;
        } catch (const c10::Error&) {
        }
        std::exit(holds ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(HostPool, a_child_of_a_process_whose_threads_make_tensors_can_make_some) {
  use_host_pool();
  std::atomic<bool> ends = false;
  std::thread busy([&] {
    while (!ends) const at::Tensor tensor = tensor_of(100 * kKiB);
  });
  for (int child = 0; child < 50; ++child) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(30);  // a child that waits for a lock ends by it
      const at::Tensor tensor = tensor_of(kMiB);
      _exit(tensor.numel() == kMiB ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
    if (status != 0) break;
  }
  ends = true;
  busy.join();
}

class OtherAllocator final : public c10::Allocator {
 public:
  explicit OtherAllocator(c10::Allocator* inner) : inner_(inner) {}
  c10::DataPtr allocate(size_t bytes) override { return inner_->allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { inner_->copy_data(to, from, bytes); }

 private:
  c10::Allocator* inner_;
};

TEST(HostPool, refuses_to_stand_behind_another_allocator) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that has no pool yet
  EXPECT_EXIT(
      {
        c10::SetCPUAllocator(new OtherAllocator(c10::GetCPUAllocator()), /*priority=*/200);
        int refused = 0;
        for (int call = 0; call < 2; ++call) try {
            use_host_pool();
          } catch (const Error& error) {
            refused += std::string(error.what()).find("another allocator was set for the CPU") != std::string::npos;
          }
        const at::Tensor tensor = at::ones({kMiB});
        std::exit(refused == 2 && host_pool_bytes().used == 0 ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(HostPool, a_second_call_has_no_effect) {
  use_host_pool();
  const c10::Allocator* const allocator = c10::GetCPUAllocator();
  use_host_pool();
  EXPECT_EQ(c10::GetCPUAllocator(), allocator);
}

TEST(HostPool, training_has_the_golden_runs_bits) {
  use_host_pool();
  const int64_t used_max = host_pool_bytes().used_max;
  for (const char* strategy :
       {"zero3(units=block,side_by_side=1)", "zero3(units=block)", "zero1(units=block)", "ddp(units=block)"})
    harness::expect_held(std::string("gpt(layers=2,hidden=192,heads=4,vocab=512,positions=48) mesh(dp_shard=2) ") + strategy +
                         " adamw(lr=0.001) ordered seed=5 : accumulate(2) step save step load@mesh(dp_shard=3) step");
  EXPECT_GT(host_pool_bytes().used_max, used_max + kMiB) << "the model's tensors lie in the pool";
}

}  // namespace
