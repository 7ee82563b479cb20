// The host pool in memory that other processes read (testing/device/shared_memory.h), and how they read it
// (testing/comm/peer_memory.h). Each property runs in a process that has no pool yet.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "properties/kit/expect_error.h"
#include "shardproof/base/check.h"
#include "shardproof/device/host_pool.h"
#include "testing/comm/peer_memory.h"
#include "testing/device/shared_memory.h"

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

int64_t place_of(const at::Tensor& tensor) {
  return offset_in_shared_pool(data_of(tensor));
}

bool all_are(const std::byte* data, int64_t bytes, uint8_t value) {
  for (int64_t i = 0; i < bytes; ++i)
    if (static_cast<uint8_t>(data[i]) != value) return false;
  return true;
}

// What an MpiWorld does.
MemoryFile share(int64_t bytes) {
  const MemoryFile file = reserve_shared_memory(static_cast<size_t>(bytes));
  share_host_pool();
  return file;
}

// Whether it says true in a process that has no pool yet.
void expect_in_new_process(const std::function<bool()>& body) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto in_time = [&] {
    alarm(120);  // it may wait for a child
    return body();
  };
  EXPECT_EXIT(std::exit(in_time() ? 0 : 1), testing::ExitedWithCode(0), "");
}

// What the file has in memory.
int64_t resident_bytes(const MemoryFile& file) {
  struct stat found {};
  return fstat(file.file, &found) == 0 ? int64_t{found.st_blocks} * 512 : -1;
}

// Of this process, and not for good: it may have to write files at its end.
void limit_files(rlim_t bytes) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  limit.rlim_cur = std::min(bytes, limit.rlim_max);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

}  // namespace

TEST(SharedPool, another_process_reads_what_a_tensor_holds_and_what_is_written_later) {
  expect_in_new_process([] {
    const MemoryFile file = share(100 * kMiB);
    use_host_pool();
    at::Tensor first = full(3), second = full(4, 300'000);
    const int64_t places[] = {place_of(first), place_of(second.narrow(0, 1000, 10))};
    const int64_t owner = getpid();
    int written[2] = {}, read[2] = {};
    if (pipe(written) != 0 || pipe(read) != 0) return false;
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(60);
      try {
        const PeerMemory memory(owner, file);
        const std::byte* const at_first = memory.at(places[0], kMiB);
        const std::byte* const at_second = memory.at(places[1], 299'000);
        const bool before = all_are(at_first, kMiB, 3) && all_are(at_second, 299'000, 4);
        char byte = 0;
        const bool told = ::write(read[1], &byte, 1) == 1 && ::read(written[0], &byte, 1) == 1;
        _exit(before && told && all_are(at_first, kMiB, 5) && all_are(at_second, 299'000, 4) ? 0 : 1);
      } catch (const Error& error) {
        fmt::print(stderr, "{}\n", error.what());
        _exit(1);
      }
    }
    close(read[1]);  // so that the end of a child that fails ends this
    char byte = 0;
    if (::read(read[0], &byte, 1) != 1) return false;
    first.fill_(5);
    if (::write(written[1], &byte, 1) != 1) return false;
    int status = 1;
    return waitpid(pid, &status, 0) == pid && status == 0;
  });
}

TEST(SharedPool, what_the_pool_got_before_and_small_tensors_are_the_process_own) {
  expect_in_new_process([] {
    use_host_pool();
    const at::Tensor before = full(1);
    share(100 * kMiB);
    const at::Tensor after = full(2), small = full(3, 100);
    const bool own = place_of(before) < 0 && place_of(small) < 0 && offset_in_shared_pool(nullptr) < 0;
    return own && place_of(after) > 0 && all_are(data_of(before), kMiB, 1);
  });
}

// Others would read what lies behind the file, or elsewhere.
TEST(SharedPool, every_tensor_lies_within_the_file_or_outside_of_it) {
  expect_in_new_process([] {
    use_host_pool(4096);
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 4; ++i) tensors.push_back(full(static_cast<uint8_t>(i), 16 * kMiB));
    const MemoryFile file = share(64 * kMiB);
    for (int i = 4; i < 24; ++i) tensors.push_back(full(static_cast<uint8_t>(i), 16 * kMiB));  // four of them fill it
    for (int i = 24; i < 28; ++i) tensors.push_back(full(static_cast<uint8_t>(i), 4096));      // what else would have room
    int64_t shared = 0;
    for (const at::Tensor& tensor : tensors) shared += place_of(tensor) > 0;
    tensors.clear();
    for (int i = 0; i < 8; ++i) tensors.push_back(full(static_cast<uint8_t>(i), 48 * kMiB));
    for (const at::Tensor& tensor : tensors) {
      const int64_t begin = place_of(tensor), last = place_of(tensor.narrow(0, tensor.numel() - 1, 1));
      const bool is_within = begin > 0 && last == begin + tensor.numel() - 1 && last < file.bytes;
      if (!is_within && (begin >= 0 || last >= 0)) return false;
    }
    return shared == 4;
  });
}

TEST(SharedPool, a_tensor_that_does_not_fit_leaves_the_rest_of_the_file_to_others) {
  expect_in_new_process([] {
    share(64 * kMiB);
    use_host_pool();
    const at::Tensor first = full(1, 40 * kMiB), too_large = full(2, 30 * kMiB), fits = full(3, 20 * kMiB);
    return place_of(first) > 0 && place_of(too_large) < 0 && place_of(fits) > 0;
  });
}

TEST(SharedPool, memory_that_is_dropped_is_not_shared) {
  expect_in_new_process([] {
    const MemoryFile file = reserve_shared_memory(64 * kMiB);
    use_host_pool();
    const at::Tensor before = full(1);
    drop_shared_memory();
    share_host_pool();
    const at::Tensor after = full(2, 10 * kMiB);
    struct stat found {};
    return file.file >= 0 && fstat(file.file, &found) != 0 && place_of(before) < 0 && place_of(after) < 0;
  });
}

TEST(SharedPool, a_tensor_that_is_larger_than_the_file_is_the_process_own) {
  expect_in_new_process([] {
    share(10 * kMiB);
    use_host_pool();
    const at::Tensor large = full(1, 11 * kMiB), small = full(2, kMiB);
    return place_of(large) < 0 && place_of(small) > 0 && all_are(data_of(large), 11 * kMiB, 1);
  });
}

// In a child of this process, which is a child itself.
bool child_of_child_sees(const at::Tensor& tensor, uint8_t value) {
  const pid_t pid = fork();
  if (pid == 0) _exit(all_are(data_of(tensor), tensor.numel(), value) ? 0 : 1);
  int status = 1;
  return waitpid(pid, &status, 0) == pid && status == 0;
}

TEST(SharedPool, a_child_of_fork_neither_changes_its_parents_tensors_nor_takes_their_memory) {
  expect_in_new_process([] {
    share(100 * kMiB);
    use_host_pool();
    at::Tensor kept = full(7);
    { const at::Tensor freed = full(8, 4 * kMiB); }
    int ready[2] = {};
    if (pipe(ready) != 0) return false;
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(60);
      kept.fill_(9);
      const at::Tensor mine = full(10, 4 * kMiB);  // where the parent has free memory as well
      char byte = 0;
      const bool told = ::write(ready[1], &byte, 1) == 1 && child_of_child_sees(kept, 9);
      _exit(told && place_of(mine) < 0 && place_of(kept) < 0 && all_are(data_of(kept), kMiB, 9) ? 0 : 1);
    }
    close(ready[1]);
    const at::Tensor made_later = full(11, 4 * kMiB);
    char byte = 0;
    int status = 1;
    const bool ended = ::read(ready[0], &byte, 1) == 1 && waitpid(pid, &status, 0) == pid && status == 0;
    return ended && all_are(data_of(kept), kMiB, 7) && all_are(data_of(made_later), 4 * kMiB, 11);
  });
}

TEST(SharedPool, trimmed_memory_is_the_systems_again) {
  expect_in_new_process([] {
    const MemoryFile file = share(100 * kMiB);
    use_host_pool();
    const at::Tensor small = full(3);
    { const at::Tensor large = full(1, 64 * kMiB); }
    const int64_t kept = resident_bytes(file);
    trim_host_pool();
    const int64_t left = resident_bytes(file);
    const at::Tensor again = full(2, 64 * kMiB);
    return kept >= 65 * kMiB && left < 2 * kMiB && all_are(data_of(small), kMiB, 3) && all_are(data_of(again), 64 * kMiB, 2);
  });
}

// A file beyond the limit would end the process by a signal.
TEST(SharedPool, without_files_that_are_large_enough_the_memory_is_the_process_own) {
  expect_in_new_process([] {
    limit_files(99 * kMiB);
    const MemoryFile file = share(100 * kMiB);
    limit_files(RLIM_INFINITY);
    use_host_pool();
    const at::Tensor tensor = full(1), other = full(2, 50 * kMiB);
    return file.file < 0 && place_of(tensor) < 0 && place_of(other) < 0 && all_are(data_of(tensor), kMiB, 1);
  });
}

namespace {

// A process that has shared memory, whose first bytes are x, and that ends when it is told to.
struct Peer {
  pid_t process = -1;
  MemoryFile file;
  int go = -1;
};

Peer start_peer() {
  int told[2] = {}, go[2] = {};
  if (pipe(told) != 0 || pipe(go) != 0) return {};
  const pid_t process = fork();
  if (process == 0) {
    alarm(60);
    const MemoryFile file = reserve_shared_memory(kMiB);
    const std::vector<char> text(1000, 'x');
    char byte = 0;
    const bool said =
        pwrite(file.file, text.data(), text.size(), 5000) == 1000 && write(told[1], &file, sizeof file) == sizeof file;
    _exit(said && read(go[0], &byte, 1) == 1 ? 0 : 1);
  }
  close(told[1]);
  Peer peer{process, {}, go[1]};
  if (read(told[0], &peer.file, sizeof peer.file) != ssize_t{sizeof peer.file}) return {};
  return peer;
}

bool ends_well(const Peer& peer) {
  const char byte = 0;
  int status = 1;
  return write(peer.go, &byte, 1) == 1 && waitpid(peer.process, &status, 0) == peer.process && status == 0;
}

}  // namespace

TEST(PeerMemory, what_is_read_stays_when_its_process_has_ended) {
  const Peer peer = start_peer();
  const PeerMemory memory(peer.process, peer.file);
  const std::byte* const found = memory.at(5000, 1000);
  EXPECT_TRUE(all_are(found, 1000, 'x'));
  EXPECT_TRUE(ends_well(peer));
  EXPECT_TRUE(all_are(found, 1000, 'x'));
  const int64_t end = peer.file.bytes;
  expect_error([&] { memory.at(end - 10, 11); },
               {"11 bytes from byte " + std::to_string(end - 10) + " on", std::to_string(end)});
  expect_error([&] { memory.at(-1, 1); }, {"from byte -1 on"});
  expect_error([&] { memory.at(0, INT64_MAX); }, {"9223372036854775807 bytes"});
  expect_error([&] { PeerMemory(peer.process, peer.file); }, {"cannot be opened", std::to_string(peer.process)});
}

// As a process of another container would that has the same number.
TEST(PeerMemory, another_file_than_was_said_is_refused) {
  const Peer peer = start_peer();
  MemoryFile other = peer.file, longer = peer.file;
  ++other.number;
  ++longer.bytes;
  expect_error([&] { PeerMemory(peer.process, other); }, {"another number"});
  expect_error([&] { PeerMemory(peer.process, longer); }, {"does not have", "another file"});
  expect_error([&] { PeerMemory(peer.process, {.file = peer.file.file, .bytes = 3, .number = 0}); }, {"3 bytes"});
  EXPECT_TRUE(ends_well(peer));
}
