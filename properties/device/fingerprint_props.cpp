// Fingerprints tell buffers apart.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <vector>

#include "internal/device/fingerprint.h"

using namespace shardproof;

namespace {

using Fingerprint = uint64_t (*)(const at::Tensor&);
constexpr Fingerprint kBoth[] = {fingerprint, fingerprint_by_operators};

// What is done to a copy of the values must change their fingerprint.
void expect_told_apart(const at::Tensor& values, const std::function<void(at::Tensor)>& change, const std::string& what) {
  const at::Tensor changed = values.clone();
  change(changed);
  for (const Fingerprint of : kBoth) EXPECT_NE(of(values), of(changed)) << what << ", " << values.numel() << " elements";
}

// What the fingerprint of memory is, a word at a time: of each MiB 32 lanes, eight of each quarter of its whole strides.
uint64_t by_definition(const at::Tensor& values) {
  constexpr size_t kBlock = size_t{1} << 20, kStride = 64;
  constexpr uint64_t kStart = 0x9e3779b97f4a7c15, kFactor = 0x9e3779b1;
  const auto* data = static_cast<const unsigned char*>(values.const_data_ptr());
  uint64_t print = values.nbytes();
  for (size_t begin = 0; begin < values.nbytes(); begin += kBlock) {
    const size_t bytes = std::min(kBlock, values.nbytes() - begin), part = bytes / (4 * kStride) * kStride;
    std::vector<uint64_t> lanes;
    for (uint64_t lane = 1; lane <= 32; ++lane) lanes.push_back(kStart * lane);
    for (size_t word = 0; word < (bytes + kStride - 1) / kStride * kStride; word += 8) {  // zeros behind the end
      uint64_t bits = 0;
      for (size_t byte = word; byte < std::min(bytes, word + 8); ++byte)
        bits |= static_cast<uint64_t>(data[begin + byte]) << 8 * (byte - word);
      const bool behind = word >= 4 * part;  // the whole strides
      const size_t quarter = behind ? (word - 4 * part) / kStride : word / part;
      uint64_t& lane = lanes[8 * quarter + (behind ? word - 4 * part : word % part) % kStride / 8];
      lane = std::rotl(lane ^ bits, 29) * kFactor;
    }
    uint64_t of_block = bytes;
    for (const uint64_t lane : lanes) of_block = combined(of_block, lane);
    print = combined(print, of_block);
  }
  return print;
}

}  // namespace

TEST(Fingerprint, is_the_same_by_wide_and_by_narrow_instructions) {
  const at::Tensor values = at::randint(-128, 128, {(1 << 20) + 5000}, at::kChar);
  for (const int64_t bytes : {0, 1, 63, 64, 65, 255, 256, 257, 500, 4095, 4096, 4097, 5001, 1 << 20, (1 << 20) + 4999})
    for (const int64_t begin : {0, 1}) {
      const at::Tensor part = values.narrow(0, begin, bytes);
      EXPECT_EQ(fingerprint(part), by_definition(part)) << bytes << " bytes from " << begin;
    }
}

// The pages before and behind the values cannot be touched.
TEST(Fingerprint, reads_no_byte_beside_the_values) {
  const int64_t page = ::sysconf(_SC_PAGESIZE), room = 16 * page;
  auto* const all = static_cast<char*>(::mmap(nullptr, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(all), MAP_FAILED);
  char* const begin = all + page;
  ASSERT_EQ(::mprotect(begin, room, PROT_READ | PROT_WRITE), 0);
  at::from_blob(begin, {room}, at::kChar).random_(-128, 128);
  for (const int64_t bytes : {int64_t{1}, int64_t{64}, int64_t{300}, page - 1, page, page + 65, room})
    for (char* const from : {begin, begin + room - bytes}) {
      const at::Tensor values = at::from_blob(from, {bytes}, at::kChar);
      EXPECT_EQ(fingerprint(values), fingerprint(values.clone())) << bytes;
    }
  ::munmap(all, room + 2 * page);
}

TEST(Fingerprint, of_equal_bytes_is_equal_wherever_they_lie) {
  const at::Tensor values = at::randn({70'001}), elsewhere = at::cat({at::zeros({3}), values}).narrow(0, 3, 70'001);
  for (const Fingerprint of : kBoth) EXPECT_EQ(of(values), of(elsewhere));
}

TEST(Fingerprint, changes_with_every_bit_of_every_byte) {
  for (const int64_t bytes : {1, 7, 8, 63, 64, 65, 130, 300}) {
    const at::Tensor values = at::randint(-128, 128, {bytes}, at::kChar);
    for (int64_t bit = 0; bit < 8 * bytes; ++bit)
      expect_told_apart(values, [&](at::Tensor v) { v[bit / 8].bitwise_xor_(static_cast<int8_t>(1 << bit % 8)); },
                        fmt::format("bit {}", bit));
  }
}

TEST(Fingerprint, tells_apart_what_differs_in_order_in_signs_and_in_length) {
  for (const int64_t count : {2, 5, 16, 48, 1000, 1500, 300'000}) {
    const at::Tensor values = at::randn({count});
    const auto exchange = [&](int64_t a, int64_t b) {
      expect_told_apart(
          values,
          [&](at::Tensor v) {
            const at::Tensor first = v[a].clone();
            v[a].copy_(v[b]);
            v[b].copy_(first);
          },
          fmt::format("{} and {} exchanged", a, b));
    };
    for (const int64_t apart : {1, 2, 16, 32, 368})  // between halves of a word, words, steps of a lane, and parts of 1,500
      if (apart < count) exchange(0, apart), exchange(count - 1 - apart, count - 1);
    expect_told_apart(values, [](at::Tensor v) { v.neg_(); }, "all signs");
    expect_told_apart(values, [](at::Tensor v) { v.narrow(0, 0, 2).neg_(); }, "two signs");
    expect_told_apart(values, [](at::Tensor v) { v.copy_(v.roll(1)); }, "shifted");
    for (const Fingerprint of : kBoth) EXPECT_NE(of(values), of(values.narrow(0, 0, count - 1)));
  }
  // The sign is the top bit of a word, which products alone keep where it is: two of them in a lane would cancel.
  for (const int64_t count : {16, 32, 4096})
    expect_told_apart(at::randn({count}, at::kDouble), [](at::Tensor v) { v.neg_(); }, "all signs of float64");
  for (const Fingerprint of : kBoth) EXPECT_NE(of(at::zeros({3})), of(at::zeros({4})));
}

TEST(Fingerprint, does_not_depend_on_the_number_of_threads) {
  const at::Tensor values = at::randn({3'000'000});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const uint64_t alone = fingerprint(values);
  at::set_num_threads(3);
  EXPECT_EQ(fingerprint(values), alone);
  at::set_num_threads(threads);
}

TEST(Fingerprint, of_every_dtype_and_of_nothing_is_defined) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong}) {
    expect_told_apart(at::ones({9}, dtype), [](at::Tensor v) { v[4].fill_(2); }, c10::toString(dtype));
    for (const Fingerprint of : kBoth) EXPECT_EQ(of(at::empty({0}, dtype)), of(at::empty({0}, dtype)));
  }
}
