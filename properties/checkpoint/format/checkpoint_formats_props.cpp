// Laws of the formats: what is written is read again, and what is wrong is refused by a message.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/format/pickle.h"
#include "shardproof/checkpoint/format/tensor_entry.h"
#include "internal/checkpoint/format/crc32.h"
#include "internal/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {
namespace {

uint32_t bit_by_bit(const std::string& text) {
  uint32_t crc = 0xFFFFFFFF;
  for (const char byte : text) {
    crc ^= static_cast<unsigned char>(byte);
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
  }
  return ~crc;
}

std::string random_bytes(Random& random, int64_t count) {
  std::string text(static_cast<size_t>(count), '\0');
  for (char& byte : text) byte = static_cast<char>(random());
  return text;
}

TEST(Crc32, is_that_of_zip) {
  EXPECT_EQ(crc32(0, "123456789", 9), 0xCBF43926U);
}

RC_GTEST_PROP(Crc32, equals_its_definition_and_joins, (uint64_t seed)) {
  Random random(seed);
  const std::string a = random_bytes(random, draw(random, 700)), b = random_bytes(random, draw(random, 700));
  const uint32_t first = crc32(0, a.data(), a.size()), second = crc32(0, b.data(), b.size());
  RC_ASSERT(first == bit_by_bit(a));
  RC_ASSERT(crc32(first, b.data(), b.size()) == bit_by_bit(a + b));
  RC_ASSERT(crc32_join(first, second, b.size()) == bit_by_bit(a + b));
}

Value random_value(Random& random, int depth) {
  switch (draw(random, depth > 0 ? 12 : 7)) {
    case 0:
      return Value();
    case 1:
      return Value::boolean(draw(random, 2) == 1);
    case 2:
      return Value::integer(static_cast<int64_t>(random()) >> draw(random, 64));
    case 3:
      return Value::real(std::ldexp(static_cast<double>(draw(random, 1000)), static_cast<int>(draw(random, 40)) - 20));
    case 4:
      return Value::string(fmt::format("text {}", draw(random, 4)));
    case 5:
      return Value::bytes(random_bytes(random, draw(random, 20)));
    case 6:
      return Value::global("torch", "float32");
    case 7:
    case 8: {
      Value::Items items;
      for (int64_t i = draw(random, 6); i > 0; --i) items.push_back(random_value(random, depth - 1));
      return draw(random, 2) == 0 ? Value::list(items) : Value::tuple(items);
    }
    case 9:
      return Value::reduced("torch", "Size", {random_value(random, depth - 1)});
    default: {
      Value::Pairs pairs;
      for (int64_t i = draw(random, 5); i > 0; --i)
        pairs.emplace_back(Value::string(fmt::format("key {}", i)), random_value(random, depth - 1));
      return draw(random, 2) == 0 ? Value::dict(pairs)
                                  : Value::instance("torch.distributed.checkpoint.metadata", "StorageMeta", pairs);
    }
  }
}

AllowedGlobals all_globals() {
  AllowedGlobals names = metadata_globals();
  names.insert(tensor_globals().begin(), tensor_globals().end());
  return names;
}

RC_GTEST_PROP(Pickle, reads_what_it_wrote, (uint64_t seed)) {
  Random random(seed);
  const Value value = random_value(random, 4);
  for (const int protocol : {2, 4}) RC_ASSERT(read_pickle(write_pickle(value, protocol), all_globals(), "test") == value);
}

// Else the property above would say little.
TEST(Pickle, values_that_differ_in_one_thing_are_unequal) {
  const Value one = Value::integer(1), two = Value::integer(2);
  const std::vector<Value> all = {
      Value(),
      one,
      two,
      Value::real(1),
      Value::boolean(true),
      Value::string("1"),
      Value::bytes("1"),
      Value::list({one}),
      Value::list({two}),
      Value::list({one, one}),
      Value::tuple({one}),
      Value::dict({{one, one}}),
      Value::dict({{one, two}}),
      Value::dict({{two, one}}),
      Value::global("torch", "float32"),
      Value::global("torch", "float64"),
      Value::reduced("torch", "Size", {one}),
      Value::reduced("torch", "Size", {two}),
      Value::reduced("torch", "size", {one}),
      Value::reduced("torch", "Size", {}),
      Value::instance("torch", "Size", Value::Pairs{}),
      Value::instance("torch", "Size", one),
      Value::instance("torch", "Size", two),
      Value::instance("torch", "size", one),
  };
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = 0; j < all.size(); ++j) EXPECT_EQ(all[i] == all[j], i == j) << i << " and " << j;
}

// Every result of damage is a value or an Error: a crash, or anything else thrown, fails the test.
RC_GTEST_PROP(Pickle, damaged_bytes_are_data_or_an_error, (uint64_t seed)) {
  Random random(seed);
  std::string text = write_pickle(random_value(random, 4), draw(random, 2) == 0 ? 2 : 4);
  for (int64_t i = 1 + draw(random, 4); i > 0; --i)
    text[static_cast<size_t>(draw(random, static_cast<int64_t>(text.size())))] = static_cast<char>(random());
  try {
    const Value value = read_pickle(text, all_globals(), "test");
    RC_ASSERT(read_pickle(write_pickle(value, 4), all_globals(), "again") == value);
  } catch (const Error& error) {
    RC_ASSERT(std::string(error.what()).starts_with("[pickle] test: "));
  }
}

// The last byte of a pickle ends it, so what is cut off is never the whole of another one; nor is what goes on.
RC_GTEST_PROP(Pickle, a_pickle_that_is_cut_or_goes_on_is_an_error, (uint64_t seed)) {
  Random random(seed);
  const std::string text = write_pickle(random_value(random, 4), draw(random, 2) == 0 ? 2 : 4);
  const auto refused = [](const std::string& bytes) {
    expect_error([&] { read_pickle(bytes, all_globals(), "cut"); }, {"[pickle] cut"});
  };
  refused(text.substr(0, static_cast<size_t>(draw(random, static_cast<int64_t>(text.size())))));
  refused(text + static_cast<char>(random()));
}

TEST(Pickle, refuses_an_unknown_global_by_its_name) {
  const std::string whole = std::string(
      "\x80\x02"
      "cposix\nsystem\nX\x02\0\0\0ls\x85R.",
      27);
  for (const auto* allowed : {&metadata_globals(), &tensor_globals()})
    expect_error([&] { read_pickle(whole, *allowed, "evil.pkl"); }, {"posix.system", "evil.pkl"});
}

TEST(Pickle, refuses_cycles_depth_and_values_that_unfold_without_end) {
  const auto memo = [](const std::string& text) {  // 'm' and 'g': put into entry 0 of the memo, and get it
    std::string bytes = "\x80\x02";
    for (const char c : text) bytes += c == 'm' ? std::string("q\0", 2) : c == 'g' ? std::string("h\0", 2) : std::string(1, c);
    return bytes;
  };
  const std::string tuple = "\x85";
  for (const std::string& cycle : {std::string("]mga."), std::string("]m(ge."), "]mg" + tuple + "a.", std::string("}mgNs."),
                                   std::string("}mNgs."), "]m]ga" + tuple + "ga."})
    expect_error([&] { read_pickle(memo(cycle), {}, "cycle"); }, {"[pickle] cycle"});
  EXPECT_EQ(read_pickle(memo("]mg\x86."), {}, "shared").str(), "([], [])");
  std::string deep = "\x80\x02", laughs = "\x80\x04]\x94";
  for (int i = 0; i < 100; ++i) deep += "]";
  for (int i = 0; i < 99; ++i) deep += "a";
  expect_error([&] { read_pickle(deep + ".", {}, "deep"); }, {"too deeply"});
  for (char i = 0; i < 40; ++i) laughs += std::string("](h") + i + "h" + i + "e\x94";
  expect_error([&] { read_pickle(laughs + ".", {}, "laughs"); }, {"too many"});
}

RC_GTEST_PROP(TensorEntry, is_parsed_as_it_was_laid_out, (uint64_t seed)) {
  Random random(seed);
  const Sample sample = random_sample(random, 1);
  const at::Tensor& tensor = sample.tensors.begin()->second;
  const std::string payload = bytes_in(tensor);
  const TensorEntryLayout layout = lay_out_tensor_entry(tensor.scalar_type(), tensor.sizes().vec());
  const std::string entry = layout.head + payload + layout.tail(crc32(0, payload.data(), payload.size()));
  RC_ASSERT(entry.size() == layout.length);
  const MemorySource source(entry, "entry");
  const TensorEntry parsed = parse_tensor_entry(source);
  RC_ASSERT(parsed.dtype == tensor.scalar_type());
  RC_ASSERT(parsed.sizes == tensor.sizes().vec());
  RC_ASSERT(parsed.payload_offset == layout.head.size());
  RC_ASSERT(parsed.payload_offset % 64 == 0U);
  RC_ASSERT(tensor.numel() == 0 || parsed.contiguous());
  for (const ZipRecord& record : read_zip(source)) check_record(source, record);
}

TEST(TensorEntry, more_bytes_than_64_bits_count_are_refused) {
  const int64_t many = int64_t{1} << 60;
  EXPECT_EQ(bytes_of(Dtype::Double, {many - 1}), static_cast<uint64_t>(8 * (many - 1)));
  for (const auto& [dtype, sizes] : {std::pair<Dtype, Shape>{Dtype::Float, {4 * many}},
                                     {Dtype::Double, {2, many + 1}},
                                     {Dtype::Double, {many}},
                                     {Dtype::ComplexDouble, {many}}})
    expect_error([&] { bytes_of(dtype, sizes); },
                 {std::string(dtype_info(dtype).name), fmt::format("{}", sizes.back()), "2^63 bytes"});
}

// The sizes of zip64 fields, without 5 GiB of payload: what surrounds it is enough to find it.
TEST(ZipFile, a_record_beyond_4_gib_is_found) {
  struct Sparse : ByteSource {
    std::string head, tail;
    uint64_t hole = uint64_t{5} << 30;
    uint64_t size() const override { return head.size() + hole + tail.size(); }
    std::string name() const override { return "sparse"; }
    void read(uint64_t offset, void* data, size_t bytes) const override {
      const bool front = offset + bytes <= head.size();
      if (!front && offset < head.size() + hole) throw Error("reads the hole");
      std::memcpy(data, front ? head.data() + offset : tail.data() + (offset - head.size() - hole), bytes);
    }
  } sparse;
  const TensorEntryLayout layout = lay_out_tensor_entry(Dtype::Char, {5, 1 << 30});
  sparse.head = layout.head;
  sparse.tail = layout.tail(42);
  const TensorEntry entry = parse_tensor_entry(sparse);
  EXPECT_EQ(entry.payload_bytes, uint64_t{5} << 30);
  EXPECT_EQ(entry.payload_offset, layout.head.size());
  EXPECT_EQ(entry.payload_crc, 42U);
  EXPECT_EQ(sparse.size(), layout.length);
}

// APPNOTE.TXT 4.3.12. Readers other than ours look at all of it.
TEST(ZipFile, an_entry_of_its_directory_has_no_comment_no_attributes_and_no_other_disk) {
  std::string file;
  ZipWriter writer([&](const void* data, size_t bytes) { file.append(static_cast<const char*>(data), bytes); });
  writer.add("archive/data.pkl", "abc");
  writer.finish();
  const size_t entry = file.rfind("PK\x01\x02");
  ASSERT_NE(entry, std::string::npos);
  const auto number = [&](size_t offset, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(file.at(entry + offset + i));
    return value;
  };
  EXPECT_EQ(number(10, 2), 0u) << "stored";
  EXPECT_EQ(number(12, 4), 0u) << "time and date";
  EXPECT_EQ(number(20, 4), 3u) << "compressed size";
  EXPECT_EQ(number(24, 4), 3u) << "size";
  EXPECT_EQ(number(28, 2), 16u) << "length of the name";
  EXPECT_EQ(number(30, 2), 0u) << "length of the extra field";
  EXPECT_EQ(number(32, 2), 0u) << "length of the comment";
  EXPECT_EQ(number(34, 2), 0u) << "disk";
  EXPECT_EQ(number(36, 2), 0u) << "internal attributes";
  EXPECT_EQ(number(38, 4), 0u) << "external attributes";
  EXPECT_EQ(number(42, 4), 0u) << "where its record begins";
}

RC_GTEST_PROP(Metadata, reads_what_it_wrote, (uint64_t seed)) {
  Random random(seed);
  const Scratch scratch;
  const Checkpoint checkpoint =
      write_sample(system_files(), random, random_sample(random, 6), scratch.path(), 1 + draw(random, 4), false);
  RC_ASSERT(read_metadata(write_metadata(checkpoint), "test") == checkpoint);
  RC_ASSERT(open_checkpoint(system_files(), scratch.path()) == checkpoint);
}

// A tree of values writes equal sizes as often as they occur, and they are the same values.
RC_GTEST_PROP(Metadata, is_a_pickle_of_the_values_that_are_read_from_it, (uint64_t seed)) {
  Random random(seed);
  const Scratch scratch;
  const std::string metadata =
      write_metadata(write_sample(system_files(), random, random_sample(random, 6), scratch.path(), 1 + draw(random, 4), true));
  const Value values = read_pickle(metadata, metadata_globals(), "test");
  RC_ASSERT(read_pickle(write_pickle(values, 4), metadata_globals(), "test") == values);
}

TEST(Metadata, equal_sizes_are_written_once) {
  Checkpoint checkpoint;
  for (int i = 0; i < 50; ++i)
    checkpoint.tensors[fmt::format("w{}", i)] = {Dtype::Float, {70001, 5}, {{{70002, 0}, {9, 5}, {"a", 0, 10}}}};
  const std::string metadata = write_metadata(checkpoint);
  for (const char* written : {"J\x71\x11\x01\x00", "J\x72\x11\x01\x00"}) {  // 70001 and 70002
    const std::string_view bytes(written, 5);
    const size_t first = metadata.find(bytes);
    EXPECT_NE(first, std::string::npos);
    EXPECT_EQ(metadata.find(bytes, first + 1), std::string::npos);
  }
  EXPECT_EQ(read_metadata(metadata, "test"), checkpoint);
}

Checkpoint one_tensor() {
  Checkpoint checkpoint;
  checkpoint.tensors["w"] = {Dtype::Float, {4, 4}, {{{0, 0}, {2, 4}, {"a", 0, 10}}, {{2, 0}, {2, 4}, {"a", 10, 10}}}};
  return checkpoint;
}

TEST(Metadata, a_box_that_is_stored_twice_is_refused_whatever_lies_between) {
  Checkpoint checkpoint = one_tensor();
  checkpoint.tensors["w"].chunks.push_back(checkpoint.tensors["w"].chunks[0]);
  expect_error([&] { read_metadata(write_metadata(checkpoint), "test"); }, {"tensor w", "is stored twice at [0, 0]"});
}

TEST(Metadata, chunks_are_found_in_whichever_order_they_are_listed) {
  Checkpoint checkpoint = one_tensor();
  checkpoint.tensors["v"] = checkpoint.tensors["w"];
  std::swap(checkpoint.tensors["w"].chunks[0], checkpoint.tensors["w"].chunks[1]);
  const Checkpoint read = read_metadata(write_metadata(checkpoint), "test");
  EXPECT_EQ(read.tensors, checkpoint.tensors);
}

TEST(Metadata, what_cannot_be_is_refused_with_tensor_box_and_file) {
  using Change = std::function<void(StoredTensor&)>;
  const std::vector<std::pair<Change, std::string>> changes = {
      {[](auto& w) { w.chunks[1].offsets[0] = 1; }, "overlap"},
      {[](auto& w) { w.chunks[1].offsets[0] = 3; }, "inside"},
      {[](auto& w) { w.chunks[1].offsets[0] = -1; }, "inside"},
      {[](auto& w) { w.chunks[1].sizes[1] = int64_t{1} << 62; }, "inside"},
      {[](auto& w) { w.chunks[1].sizes.pop_back(); }, "inside"},
      {[](auto& w) { w.chunks.pop_back(); }, "8 of 16"},
      {[](auto& w) { w.sizes[0] = -4; }, "-4"},
      {[](auto& w) { w.chunks[1].extent.offset = 9; }, "overlap"},
      {[](auto& w) { w.chunks[1].extent.file = "../a"; }, "outside"},
      {[](auto& w) { w.chunks[1].extent.file = "/a"; }, "outside"},
      {[](auto& w) { w.chunks[1].extent.file = "b/../../a"; }, "outside"},
      {[](auto& w) { w.chunks[1].extent.length = 0; }, "0 bytes"},
  };
  validate(one_tensor(), "test");
  for (const auto& [change, message] : changes) {
    Checkpoint checkpoint = one_tensor();
    change(checkpoint.tensors["w"]);
    expect_error([&] { validate(checkpoint, "test"); }, {message});
  }
}

TEST(Pickle, every_way_that_protocols_2_to_5_have_to_write_a_value_is_read) {
  const auto sized = [](const char* opcode, size_t width, const std::string& text) {
    std::string bytes = opcode;
    for (size_t i = 0; i < width; ++i) bytes += static_cast<char>(text.size() >> (8 * i));
    return bytes + text;
  };
  const Value text = Value::string("ab"), bytes = Value::bytes("ab"), none, one = Value::integer(1);
  const std::string minus_300("\xd4\xfe", 2);
  const std::vector<std::pair<std::string, Value>> written = {
      {sized("\x8c", 1, "ab"), text},
      {sized("X", 4, "ab"), text},
      {sized("\x8d", 8, "ab"), text},
      {sized("C", 1, "ab"), bytes},
      {sized("B", 4, "ab"), bytes},
      {sized("\x8e", 8, "ab"), bytes},
      {sized("\x8a", 1, minus_300), Value::integer(-300)},
      {sized("\x8b", 4, minus_300), Value::integer(-300)},
      {"(K\1Nt", Value::tuple({one, none})},
      {")", Value::tuple({})},
      {"]K\1a", Value::list({one})},
      {"](K\1Ne", Value::list({one, none})},
      {"}K\1Ns", Value::dict({{one, none}})},
      {"}(K\1Nu", Value::dict({{one, none}})},
      {"ctorch\nfloat32\n", Value::global("torch", "float32")},
      {sized("\x8c", 1, "torch") + sized("\x8c", 1, "float32") + "\x93", Value::global("torch", "float32")},
      {std::string("K\1r\0\0\0\0j\0\0\0\0\x86", 13), Value::tuple({one, one})},
  };
  for (const auto& [opcodes, value] : written) {
    const Value read = read_pickle("\x80\x02" + opcodes + ".", all_globals(), "test");
    EXPECT_TRUE(read == value) << read.str() << " instead of " << value.str();
  }
  expect_error([] { read_pickle("\x80\x02NN\x93.", all_globals(), "test"); }, {"[pickle] test", "global by what is no string"});
}

TEST(Pickle, more_values_than_a_short_memo_holds_are_shared_as_well) {
  Value::Items items;
  for (int64_t i = 0; i < 300; ++i) items.push_back(Value::string(fmt::format("text {}", i)));
  items.push_back(items.back());
  items.push_back(items.front());
  const Value all = Value::list(std::move(items));
  for (const int protocol : {2, 4}) {
    const std::string text = write_pickle(all, protocol);
    EXPECT_TRUE(read_pickle(text, {}, "test") == all) << protocol;
    EXPECT_EQ(text.find("text 299"), text.rfind("text 299")) << "it is written once";
  }
}

TEST(Pickle, a_value_of_another_kind_is_named_with_what_it_should_be) {
  EXPECT_EQ(Value::bytes("ab").as_bytes("it"), "ab");
  expect_error([] { Value::integer(7).as_bytes("the seed"); }, {"the seed should be bytes, got an int: 7"});
}

}  // namespace
}  // namespace shardproof::checkpoint
