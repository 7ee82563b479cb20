// Reading any box equals slicing the whole tensor, within bounded memory.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/box_read.h"

namespace shardproof::checkpoint {
namespace {

RC_GTEST_PROP(BoxReader, any_box_equals_the_slice_of_the_whole_tensor, (uint64_t seed)) {
  Random random(seed);
  const Scratch scratch;
  const Sample sample = random_sample(random, 5);
  const Checkpoint checkpoint = write_sample(system_files(), random, sample, scratch.path(), 1 + draw(random, 3));
  const ReadOptions options{.bytes_max = static_cast<uint64_t>(1 + draw(random, 400)),
                            .gap_max = static_cast<uint64_t>(draw(random, 40)),
                            .check_parts = draw(random, 2) == 0};
  BoxReader reader(system_files(), scratch.path(), checkpoint, options);
  for (const auto& [name, tensor] : sample.tensors) {
    RC_ASSERT(bytes_in(reader.read(name)) == bytes_in(tensor));
    Box box;
    for (const int64_t size : tensor.sizes()) {
      const int64_t a = draw(random, size + 1), b = draw(random, size + 1);
      box.push_back({std::min(a, b), std::max(a, b)});
    }
    const at::Tensor expected = slice(tensor, box);
    at::Tensor got = at::empty_like(expected);
    // As often as not into memory that is not contiguous.
    if (got.dim() >= 2 && draw(random, 2) == 0) got = at::empty_like(expected.transpose(0, 1).contiguous()).transpose(0, 1);
    reader.read(name, box, got);
    RC_ASSERT(bytes_in(got) == bytes_in(expected));
  }
  RC_ASSERT(reader.counts().buffer_bytes <= options.bytes_max);
}

struct OneTensor {
  Scratch scratch;
  at::Tensor tensor = at::arange(1 << 20, at::kFloat).view({1024, 1024});
  Checkpoint checkpoint;
  OneTensor() {
    EntryFile file(system_files(), scratch.path(), entry_file_name(0));
    const auto written = file.add_tensor(Dtype::Float, {1024, 1024}, tensor.const_data_ptr());
    file.finish();
    checkpoint.tensors["w"] = {Dtype::Float, {1024, 1024}, {{{0, 0}, {1024, 1024}, written.extent}}};
  }
};

TEST(BoxReader, rows_are_one_read_straight_into_the_destination) {
  const OneTensor one;
  BoxReader reader(system_files(), one.scratch.path(), one.checkpoint);
  at::Tensor half = at::empty({512, 1024});
  reader.read("w", {{512, 1024}, {0, 1024}}, half);
  EXPECT_TRUE(half.equal(one.tensor.slice(0, 512)));
  EXPECT_EQ(reader.counts().reads, 1);
  EXPECT_EQ(reader.counts().bytes_read, uint64_t{512 * 1024 * 4});
  EXPECT_EQ(reader.counts().buffer_bytes, 0U);
}

TEST(BoxReader, columns_are_few_reads_within_the_bound) {
  const OneTensor one;
  BoxReader reader(system_files(), one.scratch.path(), one.checkpoint, {.bytes_max = 1 << 20});
  at::Tensor half = at::empty({1024, 512});
  reader.read("w", {{0, 1024}, {512, 1024}}, half);
  EXPECT_TRUE(half.equal(one.tensor.slice(1, 512)));
  EXPECT_LE(reader.counts().reads, 5);
  EXPECT_LE(reader.counts().buffer_bytes, uint64_t{1} << 20);
}

TEST(BoxReader, a_flipped_bit_is_an_error_when_the_whole_entry_is_read_or_checked) {
  const OneTensor one;
  std::string bytes = slurp(one.scratch / "__0_0.distcp");
  bytes[3 << 20] ^= 4;
  spill(one.scratch / "__0_0.distcp", bytes);
  expect_error([&] { BoxReader(system_files(), one.scratch.path(), one.checkpoint).read("w"); },
               {"tensor w", "__0_0.distcp", "[0:1024, 0:1024]"});
  BoxReader strict(system_files(), one.scratch.path(), one.checkpoint, {.check_parts = true});
  at::Tensor row = at::empty({1, 1024});
  expect_error([&] { strict.read("w", {{0, 1}, {0, 1024}}, row); }, {"tensor w"});
}

// Tied tensors have one extent. Another dtype or other sizes would read what lies elsewhere.
TEST(BoxReader, tensors_in_the_same_bytes_are_alike) {
  OneTensor one;
  const Extent extent = one.checkpoint.tensors.at("w").chunks[0].extent;
  one.checkpoint.tensors["tied"] = one.checkpoint.tensors.at("w");
  one.checkpoint.tensors["flat"] = {Dtype::Float, {1 << 20}, {{{0}, {1 << 20}, extent}}};
  one.checkpoint.tensors["turned"] = {Dtype::Float, {512, 2048}, {{{0, 0}, {512, 2048}, extent}}};
  one.checkpoint.tensors["whole"] = {Dtype::Int, {1024, 1024}, {{{0, 0}, {1024, 1024}, extent}}};
  one.checkpoint.tensors["scalar"] = {Dtype::Float, {}, {{{}, {}, extent}}};
  BoxReader reader(system_files(), one.scratch.path(), one.checkpoint);
  for (const char* name : {"w", "tied"}) EXPECT_TRUE(reader.read(name).equal(one.tensor));
  for (const char* name : {"flat", "turned", "whole", "scalar"})
    expect_error([&] { reader.read(name); }, {name, "holds float32 of sizes [1024, 1024]", "belong together"});
}

TEST(BoxReader, wrong_questions_name_the_tensor) {
  const OneTensor one;
  BoxReader reader(system_files(), one.scratch.path(), one.checkpoint);
  at::Tensor row = at::empty({1, 1024});
  expect_error([&] { reader.read("v"); }, {"no tensor v"});
  expect_error([&] { reader.read("w", {{1024, 1025}, {0, 1024}}, row); }, {"tensor w"});
  expect_error([&] { reader.read("w", {{0, 2}, {0, 1024}}, row); }, {"tensor w"});
  expect_error([&] { reader.read("w", {{0, 1}, {0, 1024}}, row.to(at::kDouble)); }, {"tensor w", "float32"});
}

}  // namespace
}  // namespace shardproof::checkpoint
