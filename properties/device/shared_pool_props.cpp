// The host pool in memory that other processes read (testing/device/shared_place.h), and how they read it
// (testing/comm/peer_memory.h). Each property runs in a process that has no pool yet.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "properties/kit/expect_error.h"
#include "shardproof/base/check.h"
#include "shardproof/device/host_pool.h"
#include "testing/comm/peer_memory.h"
#include "testing/device/shared_place.h"

using namespace shardproof;
using process::PeerMemory;

namespace {

constexpr int64_t kMiB = 1024 * 1024;

// Children of fork() lack the threads within operators, and would wait for them.
[[maybe_unused]] const bool kOneThread = (at::set_num_threads(1), true);

at::Tensor full(uint8_t value, int64_t bytes = kMiB) {
  return at::full({bytes}, value, at::kByte);
}

const std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

SharedPlace place_of(const at::Tensor& tensor) {
  return shared_place(data_of(tensor)).value_or(SharedPlace());
}

bool all_are(const std::byte* data, int64_t bytes, uint8_t value) {
  for (int64_t i = 0; i < bytes; ++i)
    if (static_cast<uint8_t>(data[i]) != value) return false;
  return true;
}

// Whether it says true in a process that has no pool yet.
void expect_in_new_process(const std::function<bool()>& body) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(std::exit(body() ? 0 : 1), testing::ExitedWithCode(0), "");
}

int64_t shared_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("RssShmem:")) return std::stoll(line.substr(9)) * 1024;
  return -1;
}

void limit(int resource, int64_t bytes) {
  const rlimit wanted{static_cast<rlim_t>(bytes), static_cast<rlim_t>(bytes)};
  ASSERT_EQ(setrlimit(static_cast<__rlimit_resource>(resource), &wanted), 0);
}

}  // namespace

TEST(SharedPool, another_process_reads_what_a_tensor_holds_and_what_is_written_later) {
  expect_in_new_process([] {
    share_host_pool();
    use_host_pool();
    at::Tensor first = full(3), second = full(4, 300'000);
    const SharedPlace places[] = {place_of(first), place_of(second.narrow(0, 1000, 10))};
    const int64_t owner = getpid();
    int written[2] = {}, read[2] = {};
    if (pipe(written) != 0 || pipe(read) != 0) return false;
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(60);
      PeerMemory memory(owner);
      const std::byte* const at_first = memory.at(places[0], kMiB);
      const std::byte* const at_second = memory.at(places[1], 299'000);
      const bool before = all_are(at_first, kMiB, 3) && all_are(at_second, 299'000, 4);
      char byte = 0;
      const bool told = ::write(read[1], &byte, 1) == 1 && ::read(written[0], &byte, 1) == 1;
      _exit(before && told && all_are(at_first, kMiB, 5) && all_are(at_second, 299'000, 4) ? 0 : 1);
    }
    char byte = 0;
    if (::read(read[0], &byte, 1) != 1) return false;
    first.fill_(5);
    if (::write(written[1], &byte, 1) != 1) return false;
    int status = 1;
    return waitpid(pid, &status, 0) == pid && status == 0;
  });
}

TEST(SharedPool, what_the_pool_took_before_and_small_tensors_are_the_process_own) {
  expect_in_new_process([] {
    use_host_pool();
    const at::Tensor before = full(1);
    share_host_pool();
    const at::Tensor after = full(2), small = full(3, 100);
    const bool own = !shared_place(data_of(before)) && !shared_place(data_of(small)) && !shared_place(nullptr);
    return own && shared_place(data_of(after)) && all_are(data_of(before), kMiB, 1);
  });
}

// A block that lay in two files would be read from the wrong one.
TEST(SharedPool, every_tensor_lies_within_one_file) {
  expect_in_new_process([] {
    limit(RLIMIT_AS, int64_t{64} << 30);  // so that the pool takes few addresses at a time
    share_host_pool();
    use_host_pool();
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 40; ++i) tensors.push_back(full(static_cast<uint8_t>(i), 10 * kMiB));
    tensors.clear();
    for (int i = 0; i < 12; ++i) tensors.push_back(full(static_cast<uint8_t>(i), 37 * kMiB));
    for (const at::Tensor& tensor : tensors) {
      const SharedPlace begin = place_of(tensor), end = place_of(tensor.narrow(0, tensor.numel() - 1, 1));
      if (begin.file < 0 || begin.file != end.file || end.offset - begin.offset != tensor.numel() - 1) return false;
    }
    return true;
  });
}

TEST(SharedPool, a_child_of_fork_neither_changes_its_parents_tensors_nor_takes_their_memory) {
  expect_in_new_process([] {
    share_host_pool();
    use_host_pool();
    at::Tensor kept = full(7);
    { const at::Tensor freed = full(8, 4 * kMiB); }
    at::Tensor made_later;
    int ready[2] = {};
    if (pipe(ready) != 0) return false;
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(60);
      kept.fill_(9);
      const at::Tensor mine = full(10, 4 * kMiB);  // where the parent has free memory as well
      char byte = 0;
      const bool told = ::write(ready[1], &byte, 1) == 1;
      _exit(told && !shared_place(data_of(mine)) && all_are(data_of(kept), kMiB, 9) ? 0 : 1);
    }
    made_later = full(11, 4 * kMiB);
    char byte = 0;
    int status = 1;
    const bool ended = ::read(ready[0], &byte, 1) == 1 && waitpid(pid, &status, 0) == pid && status == 0;
    return ended && all_are(data_of(kept), kMiB, 7) && all_are(data_of(made_later), 4 * kMiB, 11);
  });
}

TEST(SharedPool, trimmed_memory_is_the_systems_again) {
  expect_in_new_process([] {
    share_host_pool();
    use_host_pool();
    const int64_t before = shared_resident_bytes();
    { const at::Tensor large = full(1, 64 * kMiB); }
    const int64_t kept = shared_resident_bytes() - before;
    trim_host_pool();
    const int64_t left = shared_resident_bytes() - before;
    const at::Tensor again = full(2, 64 * kMiB);
    return kept >= 63 * kMiB && left < 2 * kMiB && all_are(data_of(again), 64 * kMiB, 2);
  });
}

// A file beyond the limit would end the process by a signal.
TEST(SharedPool, without_files_that_are_large_enough_the_memory_is_the_process_own) {
  expect_in_new_process([] {
    limit(RLIMIT_FSIZE, 1000);
    share_host_pool();
    use_host_pool();
    const at::Tensor tensor = full(1), other = full(2, 100 * kMiB);
    return host_pool_bytes().used >= 101 * kMiB && !shared_place(data_of(tensor)) && !shared_place(data_of(other)) &&
           all_are(data_of(tensor), kMiB, 1);
  });
}

TEST(PeerMemory, what_is_read_stays_when_its_process_has_ended) {
  int places[2] = {};
  ASSERT_EQ(pipe(places), 0);
  int go[2] = {};
  ASSERT_EQ(pipe(go), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(60);
    const int32_t file = make_memory_file(kMiB);
    const std::vector<char> text(1000, 'x');
    char byte = 0;
    const bool said =
        pwrite(file, text.data(), text.size(), 5000) == 1000 && write(places[1], &file, sizeof file) == sizeof file;
    _exit(said && read(go[0], &byte, 1) == 1 ? 0 : 1);
  }
  int32_t file = -1;
  ASSERT_EQ(read(places[0], &file, sizeof file), ssize_t{sizeof file});
  PeerMemory memory(pid);
  const std::byte* const found = memory.at({file, 5000}, 1000);
  EXPECT_TRUE(all_are(found, 1000, 'x'));
  const char byte = 0;
  ASSERT_EQ(write(go[1], &byte, 1), 1);
  int status = 1;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(all_are(found, 1000, 'x'));
  expect_error([&] { memory.at({file, kMiB - 10}, 11); }, {"11 bytes from byte 1048566 on", "which has 1048576"});
  expect_error([&] { memory.at({file, -1}, 1); }, {"from byte -1 on"});
  expect_error([&] { memory.at({file, 0}, INT64_MAX); }, {"9223372036854775807 bytes"});
  expect_error([&] { PeerMemory(pid).at({file, 0}, 1); }, {"cannot be opened", std::to_string(pid)});
}
