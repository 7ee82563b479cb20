// How a GPU's launches cover memory, on their twin on the CPU: arrays of more elements than 32 bits count, every alignment, and
// tails. Nothing here needs a GPU or depends on one.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "shardproof/device/device.h"
#include "internal/device/pack_math.h"

using namespace shardproof;

namespace {

constexpr int64_t kThreads = 256, kLongest = int64_t{1} << 39;

// Memory that costs nothing until it is written; it reads as zeros.
class Reserved {
 public:
  explicit Reserved(size_t bytes) : bytes_(bytes) {
    void* all = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) throw std::runtime_error("no addresses for the test");
    data = static_cast<std::byte*>(all);
  }
  ~Reserved() { ::munmap(data, bytes_); }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

  std::byte* data;

 private:
  size_t bytes_;
};

// An array of an operation, with room before and behind.
struct alignas(64) Memory {
  static constexpr size_t kBytes = 1024, kBegin = 128;
  std::array<std::byte, kBytes> at;
};

struct Operation {
  std::string name;
  std::vector<Element> arrays;
  std::function<int64_t(const DeviceMath&, const std::vector<std::byte*>&, int64_t)> run;  // returns what it found, else 0
};

size_t bytes_of(Element type) {
  switch (type) {
    case Element::f64:
    case Element::i64: return 8;
    case Element::f32:
    case Element::i32: return 4;
    case Element::bf16:
    case Element::f16: return 2;
    case Element::u8: return 1;
  }
  return 0;
}

// Ordinary positive numbers of the type, other ones in each array.
void fill(Memory& memory, Element type, size_t salt) {
  for (size_t i = 0; i * 8 < Memory::kBytes; ++i)
    for (size_t k = 0; k < 8 / bytes_of(type); ++k) {
      const uint64_t bits = (i * 8 + k + 1) * 0x9e3779b97f4a7c15u + salt * 0xbf58476d1ce4e5b9u;
      uint64_t value = bits >> 40;
      const double real = 0.5 + static_cast<double>(value) * 0x1p-25;
      const auto single = static_cast<float>(real);
      uint32_t single_bits;
      std::memcpy(&single_bits, &single, 4);
      if (type == Element::f64) std::memcpy(&value, &real, 8);
      if (type == Element::f32) value = single_bits;
      if (type == Element::bf16) value = single_bits >> 16;
      if (type == Element::f16) value = 0x3800 | (bits >> 54);
      std::memcpy(memory.at.data() + i * 8 + k * bytes_of(type), &value, bytes_of(type));
    }
}

// Both kinds of arithmetic on the same memory: what they return, and every byte, those around the arrays included.
testing::AssertionResult agree(const Operation& operation, const std::vector<size_t>& offsets, int64_t count) {
  static const std::shared_ptr<const DeviceMath> twin = pack_math();
  const auto run = [&](const DeviceMath& math, std::vector<Memory>& memory) {
    std::vector<std::byte*> arrays;
    for (size_t k = 0; k < operation.arrays.size(); ++k) {
      fill(memory[k], operation.arrays[k], k);
      arrays.push_back(memory[k].at.data() + Memory::kBegin + offsets[k] * bytes_of(operation.arrays[k]));
    }
    return operation.run(math, arrays, count);
  };
  std::vector<Memory> expected(operation.arrays.size()), found(operation.arrays.size());
  const int64_t expected_result = run(device_math(c10::Device(c10::kCPU)), expected);
  try {
    if (run(*twin, found) != expected_result) return testing::AssertionFailure() << operation.name << " found another place";
  } catch (const std::logic_error& error) {
    return testing::AssertionFailure() << operation.name << " of " << count << ": " << error.what();
  }
  for (size_t k = 0; k < found.size(); ++k)
    for (size_t i = 0; i < Memory::kBytes; ++i)
      if (found[k].at[i] != expected[k].at[i])
        return testing::AssertionFailure() << operation.name << " of " << count << ": byte "
                                           << static_cast<int64_t>(i) - static_cast<int64_t>(Memory::kBegin) << " of array "
                                           << k;
  return testing::AssertionSuccess();
}

UpdateArrays update_of(Element type, const std::vector<std::byte*>& at, int64_t count, bool first, bool second, bool low) {
  UpdateArrays arrays{.type = type, .parameter = at[0], .gradient = at[1], .count = count};
  size_t next = 2;
  if (first) arrays.first = at[next++];
  if (second) arrays.second = at[next++];
  if (low) arrays.low = at[next++];
  return arrays;
}

std::vector<Operation> operations() {
  using At = const std::vector<std::byte*>&;
  std::vector<Operation> all;
  for (const Element type :
       {Element::f32, Element::f64, Element::bf16, Element::f16, Element::i32, Element::i64, Element::u8}) {
    all.push_back({"reduce", {type, type, type}, [type](const DeviceMath& math, At at, int64_t n) -> int64_t {
                     const std::byte* terms[] = {at[0], at[1]};
                     math.reduce(type, Reduce::sum, terms, n, at[2]);
                     return 0;
                   }});
    all.push_back({"store_fixed", {Element::i64, type}, [type](const DeviceMath& math, At at, int64_t n) -> int64_t {
                     return math.store_fixed(reinterpret_cast<int64_t*>(at[0]), type, at[1], n, true, 0x1p-8, 1e9, 1e15);
                   }});
    all.push_back({"first_beyond", {type}, [type](const DeviceMath& math, At at, int64_t n) {
                     return math.first_beyond(type, at[0], n, 0.9);
                   }});
    all.push_back({"note_beyond", {type}, [type](const DeviceMath& math, At at, int64_t n) {
                     int64_t least = 5000 + n / 2;
                     math.note_beyond(type, at[0], n, 0.9, 5000, &least);
                     return least;
                   }});
  }
  for (const Element type : {Element::f32, Element::bf16, Element::f16}) {
    all.push_back({"sum_wide", {type, type, Element::bf16}, [type](const DeviceMath& math, At at, int64_t n) -> int64_t {
                     const std::byte* terms[] = {at[0], at[1]};
                     math.sum_wide(type, terms, n, Element::bf16, at[2]);
                     return 0;
                   }});
    all.push_back({"store", {Element::f32, type}, [type](const DeviceMath& math, At at, int64_t n) -> int64_t {
                     math.store(reinterpret_cast<float*>(at[0]), type, at[1], n, true);
                     return 0;
                   }});
  }
  for (const Element type : {Element::f32, Element::f64}) {
    all.push_back({"sgd", {type, type, type}, [type](const DeviceMath& math, At at, int64_t n) -> int64_t {
                     math.sgd({.lr = 0.1, .decay = 0.01, .momentum = 0.9}, update_of(type, at, n, true, false, false));
                     return 0;
                   }});
    all.push_back({"adam", {type, type, type, type}, [type](const DeviceMath& math, At at, int64_t n) -> int64_t {
                     math.adam({.keep = 0.99, .beta1 = 0.9, .beta1_rest = 0.1, .beta2 = 0.99, .beta2_rest = 0.01, .eps = 1e-8,
                                .rate = 1e-3}, update_of(type, at, n, true, true, false));
                     return 0;
                   }});
    all.push_back({"lion", {type, type, type}, [type](const DeviceMath& math, At at, int64_t n) -> int64_t {
                     math.lion({.keep = 0.99, .lr = 0.1, .beta1 = 0.9, .beta1_rest = 0.1, .beta2 = 0.99, .beta2_rest = 0.01},
                               update_of(type, at, n, true, false, false));
                     return 0;
                   }});
  }
  all.push_back({"adam with a copy", {Element::f32, Element::f32, Element::f32, Element::f32, Element::bf16},
                 [](const DeviceMath& math, At at, int64_t n) -> int64_t {
                   math.adam({.beta1 = 0.9, .beta1_rest = 0.1, .beta2 = 0.99, .beta2_rest = 0.01, .rate = 1e-3},
                             update_of(Element::f32, at, n, true, true, true));
                   return 0;
                 }});
  all.push_back({"divide", {Element::f32}, [](const DeviceMath& math, At at, int64_t n) -> int64_t {
                   math.divide(reinterpret_cast<float*>(at[0]), n, 3);
                   return 0;
                 }});
  all.push_back({"fixed_to_float", {Element::f32, Element::i64}, [](const DeviceMath& math, At at, int64_t n) -> int64_t {
                   math.fixed_to_float(reinterpret_cast<float*>(at[0]), reinterpret_cast<const int64_t*>(at[1]), n, 0x1p-8f);
                   return 0;
                 }});
  return all;
}

}  // namespace

TEST(Tails, of_every_length_at_every_alignment_have_the_bits_of_single_elements_and_touch_nothing_else) {
  for (const Operation& operation : operations())
    for (size_t array = 0; array <= operation.arrays.size(); ++array)  // which one lies elsewhere; at the end: all of them
      for (size_t offset = 0; offset <= 16; ++offset)
        for (int64_t count = 0; count <= 34; ++count) {
          std::vector<size_t> offsets(operation.arrays.size(), array == operation.arrays.size() ? offset : 0);
          if (array < operation.arrays.size()) offsets[array] = offset;
          ASSERT_TRUE(agree(operation, offsets, count)) << "array " << array << " lies " << offset << " elements behind a word";
        }
}

RC_GTEST_PROP(Launches, cover_each_element_once_in_arrays_of_up_to_2_to_the_39, ()) {
  const int64_t count = *rc::gen::oneOf(rc::gen::inRange<int64_t>(0, 5000), rc::gen::inRange<int64_t>(0, kLongest),
                                        rc::gen::inRange<int64_t>((int64_t{1} << 31) - 9, (int64_t{1} << 31) + 9));
  const int width = *rc::gen::element(1, 4, 8);
  const TwinLaunches all = twin_launches(count, width, *rc::gen::arbitrary<bool>());
  RC_ASSERT(all.rest_begin == all.packs * width);
  RC_ASSERT(all.rest_begin + all.rest == count);
  RC_ASSERT(all.packs == 0 || all.rest < width);
  for (const auto& [packs, blocks] : {std::pair(all.packs, all.blocks_of_packs), std::pair(all.rest, all.blocks_of_rest)}) {
    if (packs == 0) continue;
    RC_ASSERT(blocks <= (int64_t{1} << 31) - 1);
    // Block after block, thread after thread, each has the next pack, and the last block has the last.
    const auto block = static_cast<uint32_t>(*rc::gen::inRange<int64_t>(0, blocks));
    const auto thread = static_cast<uint32_t>(*rc::gen::inRange<int64_t>(0, kThreads - 1));
    RC_ASSERT(twin_pack(0, 0) == 0);
    RC_ASSERT(twin_pack(block, thread + 1) == twin_pack(block, thread) + 1);
    RC_ASSERT(twin_pack(block + 1, 0) == twin_pack(block, kThreads - 1) + 1);
    const auto last = static_cast<uint32_t>(blocks - 1);
    RC_ASSERT(twin_pack(last, 0) < packs);
    RC_ASSERT(twin_pack(last, kThreads - 1) >= packs - 1);
  }
}

TEST(Launches, longer_arrays_than_a_grid_has_threads_for_are_refused) {
  EXPECT_NO_THROW(twin_launches(kLongest - kThreads, 1, false));
  EXPECT_THROW(twin_launches(kLongest, 1, false), std::length_error);
  EXPECT_NO_THROW(twin_launches(4 * (kLongest - kThreads), 4, true));
}

// Not only the arithmetic of indices: arrays of more than 2^31 elements, looked at to their ends.
TEST(Launches, what_lies_behind_2_to_the_31_elements_is_found_there) {
  constexpr int64_t kCount = (int64_t{1} << 31) + 261;
  Reserved memory(static_cast<size_t>(kCount));
  const std::shared_ptr<const DeviceMath> twin = pack_math();
  for (const DeviceMath* math : {&device_math(c10::Device(c10::kCPU)), twin.get()}) {
    for (const int64_t place : {kCount - 1, (int64_t{1} << 31) + 8}) {
      memory.data[place] = std::byte{7};
      EXPECT_EQ(math->first_beyond(Element::u8, memory.data, kCount, 6), place);
    }
    memory.data[kCount - 1] = memory.data[(int64_t{1} << 31) + 8] = std::byte{0};
  }
}
