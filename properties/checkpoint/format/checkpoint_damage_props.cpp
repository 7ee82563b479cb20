// Every flipped bit, cut, missing and swapped file is found, and named.
#include <gtest/gtest.h>

#include <cstdlib>

#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace shardproof::checkpoint {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> names_in(const std::string& folder) {
  return list_folder(folder);
}

bool found(const std::string& folder) {
  return !verify_checkpoint(system_files(), folder).problems.empty();
}

struct Written {
  Scratch scratch;
  Sample sample;
  Checkpoint checkpoint;
  explicit Written(Random& random, int64_t files = 3, bool checksums = true) : sample(random_sample(random, 8)) {
    checkpoint = write_sample(system_files(), random, sample, scratch.path(), files, checksums);
  }
};

// Flips and cuts, one at a time, each undone.
void damage_at_random(int64_t times, uint64_t seed) {
  Random random(seed);
  for (int64_t done = 0; done < times;) {
    const Written written(random);
    ASSERT_FALSE(found(written.scratch.path()));
    for (int64_t i = 0; i < 50 && done < times; ++i, ++done) {
      const auto names = names_in(written.scratch.path());
      const std::string path = written.scratch / names[static_cast<size_t>(draw(random, static_cast<int64_t>(names.size())))];
      const std::string before = slurp(path);
      if (before.empty()) continue;
      std::string after = before;
      const auto at = static_cast<size_t>(draw(random, static_cast<int64_t>(before.size())));
      const int64_t kind = draw(random, 4);
      if (kind == 0)
        after.resize(at);
      else if (kind == 1)
        after.insert(at, 1, static_cast<char>(random()));
      else
        after[at] = static_cast<char>(after[at] ^ 1 << draw(random, 8));
      spill(path, after);
      EXPECT_TRUE(found(written.scratch.path())) << path << " byte " << at << " kind " << kind << " seed " << seed;
      spill(path, before);
    }
  }
}

TEST(Damage, every_random_flip_and_cut_is_found) {
  const char* times = std::getenv("SHARDPROOF_DAMAGES");
  damage_at_random(times ? std::atoll(times) : 200, times ? 2 : 1);
}

TEST(Damage, every_single_bit_of_a_small_checkpoint_counts) {
  Random random(3);
  Scratch scratch;
  Sample sample;
  sample.tensors["w"] = random_tensor(random, {2, 2}, Dtype::Float);
  write_sample(system_files(), random, sample, scratch.path(), 1);
  for (const std::string& name : names_in(scratch.path())) {
    const std::string before = slurp(scratch / name);
    for (size_t bit = 0; bit < before.size() * 8; ++bit) {
      std::string after = before;
      after[bit / 8] = static_cast<char>(after[bit / 8] ^ 1 << bit % 8);
      spill(scratch / name, after);
      EXPECT_TRUE(found(scratch.path())) << name << " bit " << bit;
    }
    spill(scratch / name, before);
  }
}

TEST(Damage, missing_longer_and_swapped_files_are_found) {
  Random random(4);
  const Written written(random, 2);
  const std::vector<std::string> names = names_in(written.scratch.path());
  for (const std::string& name : names) {
    const std::string before = slurp(written.scratch / name);
    fs::remove(written.scratch / name);
    EXPECT_TRUE(found(written.scratch.path())) << name;
    spill(written.scratch / name, before + "x");
    EXPECT_TRUE(found(written.scratch.path())) << name << " is longer";
    spill(written.scratch / name, before);
  }
  const std::string a = written.scratch / "__0_0.distcp", b = written.scratch / "__1_0.distcp";
  fs::rename(a, a + "x");
  fs::rename(b, a);
  fs::rename(a + "x", b);
  EXPECT_TRUE(found(written.scratch.path()));
}

TEST(Damage, a_problem_names_file_tensor_and_box) {
  Random random(5);
  Scratch scratch;
  Sample sample;
  sample.tensors["w"] = random_tensor(random, {}, Dtype::Double);
  sample.tensors["v"] = random_tensor(random, {64}, Dtype::Double);
  const Checkpoint checkpoint = write_sample(system_files(), random, sample, scratch.path(), 1);
  const Chunk& chunk = checkpoint.tensors.at("v").chunks[0];
  std::string bytes = slurp(scratch / "__0_0.distcp");
  const std::string payload = bytes_in(slice(sample.tensors["v"], chunk.box()));
  bytes[bytes.find(payload) + 1] ^= 1;
  spill(scratch / "__0_0.distcp", bytes);
  const Verified verified = verify_checkpoint(system_files(), scratch.path());
  ASSERT_EQ(verified.problems.size(), 1U);
  EXPECT_EQ(verified.problems[0].file, "__0_0.distcp");
  EXPECT_EQ(verified.problems[0].tensor, "v");
  EXPECT_EQ(verified.problems[0].box, fmt::format("[0:{}]", chunk.sizes[0]));
}

// Without the sidecar the CRCs of the entries stand in: no payload changes unseen.
TEST(Damage, without_checksums_every_flip_in_a_payload_is_found) {
  Random random(6);
  const Written written(random, 2, false);
  ASSERT_FALSE(found(written.scratch.path()));
  for (const auto& [name, tensor] : written.checkpoint.tensors)
    for (const Chunk& chunk : tensor.chunks) {
      const std::string path = written.scratch / chunk.extent.file, before = slurp(path);
      const FileSource file(system_files(), path);
      const SliceSource slice(file, chunk.extent.offset, chunk.extent.length, "entry");
      const TensorEntry entry = parse_tensor_entry(slice);
      if (entry.payload_bytes == 0) continue;
      std::string after = before;
      const uint64_t bit = static_cast<uint64_t>(draw(random, static_cast<int64_t>(entry.payload_bytes * 8)));
      after[chunk.extent.offset + entry.payload_offset + bit / 8] ^= static_cast<char>(1 << bit % 8);
      spill(path, after);
      EXPECT_TRUE(found(written.scratch.path())) << name;
      spill(path, before);
    }
}

TEST(Damage, metadata_that_describe_an_entry_otherwise_than_it_does_itself_are_named_with_both) {
  Random random(7);
  const Scratch scratch;
  Sample sample;
  sample.tensors["w"] = random_tensor(random, {2, 3}, Dtype::Float);
  Checkpoint checkpoint = write_sample(system_files(), random, sample, scratch.path(), 1, /*checksums=*/false);
  ASSERT_FALSE(found(scratch.path()));
  checkpoint.tensors["w"].dtype = Dtype::Int;
  spill(scratch / kMetadataFile, write_metadata(checkpoint));
  const Verified verified = verify_checkpoint(system_files(), scratch.path());
  ASSERT_EQ(verified.problems.size(), checkpoint.tensors["w"].chunks.size());
  for (const Problem& problem : verified.problems)
    for (const char* part : {"w", "holds float32 of [", "but .metadata says int32 of ["})
      EXPECT_NE(problem.str().find(part), std::string::npos) << problem.str();
}

TEST(Damage, a_folder_in_the_place_of_a_file_is_refused) {
  const Scratch scratch;
  expect_error([&] { FileSource(system_files(), scratch.path()); }, {scratch.path() + " is no regular file"});
}

}  // namespace
}  // namespace shardproof::checkpoint
