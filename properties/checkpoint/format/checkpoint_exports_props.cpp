// Files of other programs: safetensors, both ways, and what torch.save would write.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/format/pickle.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/checkpoint/format/torch_file.h"
#include "internal/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {
namespace {

std::string little(uint64_t value) {
  std::string text;
  for (int i = 0; i < 8; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

std::string file_of(const std::string& header, const std::string& data) {
  return little(header.size()) + header + data;
}

RC_GTEST_PROP(Safetensors, reads_what_it_wrote_in_one_file_or_many, (uint64_t seed)) {
  Random random(seed);
  const Scratch scratch;
  Sample sample = random_sample(random, 6);
  std::erase_if(sample.tensors, [](const auto& entry) { return dtype_info(entry.second.scalar_type()).safetensors.empty(); });
  std::map<std::string, SafeTensorSpec> specs;
  for (const auto& [name, tensor] : sample.tensors) specs[name] = {tensor.scalar_type(), tensor.sizes().vec()};
  const uint64_t file_bytes_max = draw(random, 2) == 0 ? 100 : 1 << 20;
  write_safetensors(
      system_files(), scratch.path(), specs, [&](const std::string& name) { return bytes_in(sample.tensors[name]); },
      file_bytes_max);
  const SafeTensors read = open_safetensors(system_files(), scratch.path());
  RC_ASSERT(read.tensors.size() == specs.size());
  for (const auto& [name, tensor] : read.tensors) {
    RC_ASSERT(tensor.dtype == specs.at(name).dtype);
    RC_ASSERT(tensor.sizes == specs.at(name).sizes);
    RC_ASSERT(FileSource(system_files(), tensor.file).read_string(tensor.offset, tensor.bytes, 1 << 20) ==
              bytes_in(sample.tensors[name]));
  }
}

TEST(Safetensors, what_the_format_forbids_is_refused) {
  const auto entry = [](const char* shape, const char* offsets, const char* dtype = "F32") {
    return fmt::format(R"({{"dtype":"{}","shape":{},"data_offsets":{}}})", dtype, shape, offsets);
  };
  const std::string good = R"({"a":)" + entry("[2]", "[0,8]") + "}";
  const auto read = [](const std::string& bytes) { read_safetensors_header(MemorySource(bytes, "x.safetensors")); };
  read(file_of(good, std::string(8, 'x')));
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"short", "too few"},
      {little(1000) + good, "does not fit"},
      {little(UINT64_MAX) + good, "does not fit"},
      {file_of(" " + good, std::string(8, 'x')), "begin"},
      {file_of(good, std::string(7, 'x')), "cut off"},
      {file_of(good, std::string(9, 'x')), "belong to no tensor"},
      {file_of(good.substr(0, 20), ""), "json"},
      {file_of(R"({"a":)" + entry("[2]", "[0,8]") + R"(,"a":)" + entry("[2]", "[8,16]") + "}", std::string(16, 'x')), "twice"},
      {file_of(R"({"a":)" + entry("[2]", "[0,8]") + R"(,"b":)" + entry("[2]", "[4,12]") + "}", std::string(12, 'x')),
       "overlap"},
      {file_of(R"({"a":)" + entry("[2]", "[4,12]") + "}", std::string(12, 'x')), "gap"},
      {file_of(R"({"a":)" + entry("[3]", "[0,8]") + "}", std::string(8, 'x')), "shape"},
      {file_of(R"({"a":)" + entry("[-2]", "[0,8]") + "}", std::string(8, 'x')), "size"},
      {file_of(R"({"a":)" + entry("[4611686018427387904,4611686018427387904]", "[0,8]") + "}", std::string(8, 'x')), "2^62"},
      {file_of(R"({"a":)" + entry("[2]", "[8,0]") + "}", std::string(8, 'x')), "8 to 0"},
      {file_of(R"({"a":)" + entry("[2]", "[0,8]", "F99") + "}", std::string(8, 'x')), "F99"},
      {file_of(R"({"a":[1]})", ""), "dtype"},
      {file_of(R"({"__metadata__":{"k":1}})", ""), "safetensors"},
      {file_of("{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}", ""), "deep"},
  };
  for (const auto& [bytes, message] : wrong) expect_error([&, &bytes = bytes] { read(bytes); }, {message});
}

TEST(Safetensors, an_index_may_not_leave_its_folder) {
  const Scratch scratch;
  const std::string index = scratch / "model.safetensors.index.json";
  spill(index, R"({"weight_map":{"a":"../b.safetensors"}})");
  expect_error([&] { open_safetensors(system_files(), scratch.path()); }, {"outside"});
  spill(index, R"({"weight_map":{"a":"b.safetensors"}})");
  spill(scratch / "b.safetensors", file_of("{}", ""));
  expect_error([&] { open_safetensors(system_files(), index); }, {"a is not in"});
}

// Behind a gap a list has no place for a value, so its indices become keys.
TEST(TorchFile, values_at_indices_are_a_list_when_none_is_missing) {
  const Scratch scratch;
  const std::string path = scratch / "x.pt";
  const auto at = [](const char* name, int64_t index) { return Path{name, index}; };
  write_torch_file(system_files(), path, {}, {{"a", Value::integer(5)}, {"b", Value::integer(6)}, {"c", Value::integer(7)}},
                   {{"a", at("whole", 0)}, {"b", at("whole", 1)}, {"c", at("gap", 1)}}, {});
  const FileSource file(system_files(), path);
  const std::vector<ZipRecord> records = read_zip(file);
  const ZipRecord* pickle = find_record(records, "data.pkl");
  ASSERT_NE(pickle, nullptr);
  const Value value = read_pickle(file.read_string(pickle->offset, pickle->bytes, 1 << 20), tensor_globals(), path);
  const Value whole = Value::list({Value::integer(5), Value::integer(6)});
  const Value gap = Value::dict({{Value::integer(1), Value::integer(7)}});
  EXPECT_TRUE(value == Value::dict({{Value::string("gap"), gap}, {Value::string("whole"), whole}})) << value.str();
}

}  // namespace
}  // namespace shardproof::checkpoint
