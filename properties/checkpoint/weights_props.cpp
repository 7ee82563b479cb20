// Weights in the files of model families, out of one mesh and into another.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cerrno>
#include <optional>

#include "properties/doubles/cluster_disk.h"
#include "properties/kit/bits.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/family_files.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/checkpoint/format/torch_file.h"
#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/checkpoint/weights.h"
#include "shardproof/comm/agree.h"
#include "shardproof/shardproof.h"
#include "internal/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {
namespace {

using namespace family_files;

void expect_same(const Values& got, const Values& expected) {
  for (const auto& [name, value] : expected) {
    RC_ASSERT(got.contains(name));
    if (!kit::same_bits(got.at(name), value)) RC_FAIL(name + " differs");
  }
  RC_ASSERT(got.size() == expected.size());
}

// Counts the bytes that are read.
class CountingFiles : public FileSystem {
 public:
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    const ssize_t got = FileSystem::pread(fd, data, bytes, offset);
    if (got > 0) bytes_ += static_cast<uint64_t>(got);
    return got;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t bytes_ = 0;
};

HuggingFaceModel qwen2(bool tied = false) {
  return {
      "qwen2",
      LlamaOptions{
          .layers = 1, .hidden = 16, .heads = 4, .kv_heads = 2, .intermediate = 6, .vocab = 7, .tied = tied, .qkv_bias = true},
      16};
}

}  // namespace

RC_GTEST_PROP(Weights, come_back_to_the_bit_on_any_mesh, ()) {
  const HuggingFaceModel model = drawn_model();
  const Setup from = drawn_setup(model), to = drawn_setup(model);
  const auto projections =
      *rc::gen::elementOf(std::vector<Projections>{Projections::as_family, Projections::fused, Projections::separate});
  const auto file_bytes_max = static_cast<uint64_t>(drawn(1, 3) == 1 ? 100 : 1 << 20);
  RC_LOG() << model.family << ", " << from.str() << " to " << to.str();
  const Scratch scratch;
  const std::string folder = scratch / "weights";
  save_from(model, from, 7, folder,
            {.family = model.family,
             .projections = projections,
             .config = hugging_face_config(model),
             .file_bytes_max = file_bytes_max});
  const Values expected = values_of(model, 7);
  RC_ASSERT(differences(model, to, folder, {.family = model.family}, expected) == "");
  if (projections == Projections::as_family) expect_same(read_all(folder), by_definition(model, expected));
  RC_ASSERT(open_weights(system_files(), folder).contains("lm_head.weight") == !is_tied(model));
  RC_ASSERT((file_bytes_max == 100) == (::access((folder + "/model.safetensors.index.json").c_str(), F_OK) == 0));
}

RC_GTEST_PROP(Weights, of_another_dtype_are_rounded_once, ()) {
  const HuggingFaceModel model = drawn_model();
  const Dtype dtype = *rc::gen::elementOf(std::vector<Dtype>{Dtype::BFloat16, Dtype::Half, Dtype::Double});
  const Scratch scratch;
  const std::string folder = scratch / "weights";
  save_from(model, drawn_setup(model), 7, folder, {.family = model.family, .dtype = dtype});
  Values expected = values_of(model, 7), stored = by_definition(model, expected);
  for (auto& [name, value] : stored)
    if (!is_router_bias(name)) value = value.to(dtype);
  expect_same(read_all(folder), stored);
  for (auto& [name, value] : expected) value = value.to(dtype).to(at::kFloat);
  RC_ASSERT(differences(model, drawn_setup(model), folder, {.family = model.family}, expected) == "");
}

// Headers and pickles besides, which a rank without any weights would read, too.
RC_GTEST_PROP(Weights, each_rank_reads_the_bytes_that_it_holds_and_no_others, ()) {
  const HuggingFaceModel model = drawn_model();
  const Setup setup = drawn_setup(model);
  const bool torch = *rc::gen::arbitrary<bool>();
  const Scratch scratch;
  const std::string folder = scratch / "weights", file = scratch / "pytorch_model.bin";
  save_from(model, {}, 7, folder,
            {.family = model.family,
             .projections = *rc::gen::elementOf(std::vector<Projections>{Projections::as_family, Projections::fused})});
  if (torch) write_torch(file, read_all(folder));
  const std::string path = torch ? file : folder;
  CountingFiles opening;
  open_weights(opening, path);
  std::vector<std::string> wrong(static_cast<size_t>(setup.ranks()));
  on_mesh(model, setup, 99, [&](Sharded& sharded, int64_t rank) {
    CountingFiles counting;
    const LoadedWeights loaded = load_weights(path, sharded, {.family = model.family, .files = &counting});
    uint64_t own = 0;
    for (const Piece& piece : sharded.main_parameters()) own += piece.data.nbytes();
    for (const auto& [name, value] : values_of(model, 7)) own += is_router_bias(name) ? value.nbytes() : 0;
    if (loaded.bytes_read != own || counting.bytes() != opening.bytes() + own)
      wrong[static_cast<size_t>(rank)] = fmt::format("rank {} holds {} bytes and read {}, with what describes them {} of {}",
                                                     rank, own, loaded.bytes_read, counting.bytes(), opening.bytes() + own);
  });
  for (const std::string& text : wrong) RC_ASSERT(text == "");
}

RC_GTEST_PROP(Weights, in_files_of_torch_save_come_to_the_bit, ()) {
  const HuggingFaceModel model = drawn_model();
  const Values values = values_of(model, 7);
  const Scratch scratch;
  const std::string file = scratch / "model.pt";
  const bool nested = *rc::gen::arbitrary<bool>();
  std::map<std::string, Path> paths;
  const Values stored = by_definition(model, values);
  if (nested)
    for (const auto& [name, value] : stored) paths[name] = {"state", name};
  write_torch(file, stored, paths,
              nested ? std::map<std::string, Value>{{"step", Value::integer(3)}} : std::map<std::string, Value>{});
  RC_ASSERT(differences(model, drawn_setup(model), file, {.family = model.family, .entry = nested ? "state" : ""}, values) ==
            "");
}

// Separate projections of the file in a model that has them fused, and the reverse, by the definition of fusion.
TEST(Weights, fused_and_separate_projections_fill_each_other) {
  const HuggingFaceModel model = qwen2();
  const Values values = values_of(model, 7);
  const Scratch scratch;
  save_from(model, {1, 2, 1}, 7, scratch / "fused", {.family = "qwen2", .projections = Projections::fused});
  const Values stored = read_all(scratch / "fused");
  const auto of_layer = [&](const std::string& name) { return values.at("model.layers.0." + name); };
  for (const char* leaf : {".weight", ".bias"}) {
    const std::string own = leaf, at = "self_attn.";
    EXPECT_TRUE(
        kit::same_bits(stored.at("model.layers.0.self_attn.qkv_proj" + own),
                       at::cat({of_layer(at + "q_proj" + own), of_layer(at + "k_proj" + own), of_layer(at + "v_proj" + own)})));
  }
  EXPECT_TRUE(kit::same_bits(stored.at("model.layers.0.mlp.gate_up_proj.weight"),
                             at::cat({of_layer("mlp.gate_proj.weight"), of_layer("mlp.up_proj.weight")})));
  EXPECT_FALSE(stored.contains("model.layers.0.self_attn.q_proj.weight"));

  const HuggingFaceModel gpt{"gpt2", GptOptions{.layers = 1, .hidden = 6, .heads = 2, .vocab = 5, .positions = 16}, 16};
  const Values of_gpt = values_of(gpt, 7);
  save_from(gpt, {1, 2, 1}, 7, scratch / "separate", {.family = "gpt2", .projections = Projections::separate});
  const Values parts = read_all(scratch / "separate");
  const at::Tensor fused = of_gpt.at("h.0.attn.c_attn.weight");
  EXPECT_TRUE(kit::same_bits(parts.at("transformer.h.0.attn.k_proj.weight"), fused.narrow(0, 6, 6)));
  EXPECT_TRUE(kit::same_bits(parts.at("transformer.h.0.attn.v_proj.bias"), of_gpt.at("h.0.attn.c_attn.bias").narrow(0, 12, 6)));
}

TEST(Weights, that_do_not_fit_are_named_on_every_rank) {
  const Scratch scratch;
  const HuggingFaceModel model = qwen2();
  save_from(model, {}, 7, scratch / "good", {.family = "qwen2"});
  const auto refused = [&](const std::string& path, const HuggingFaceModel& into, const LoadWeightsOptions& options,
                           std::initializer_list<std::string> parts) {
    on_mesh(into, {1, 3, 1}, 5, [&](Sharded& sharded, int64_t) {
      const at::Tensor before = sharded.gather_main_parameters().begin()->second.clone();
      expect_error([&] { load_weights(path, sharded, options); }, parts);
      EXPECT_TRUE(kit::same_bits(sharded.gather_main_parameters().begin()->second, before));
    });
  };
  HuggingFaceModel wider = model, without = model;
  std::get<LlamaOptions>(wider.options).intermediate = 8;
  std::get<LlamaOptions>(without.options).qkv_bias = false;
  refused(scratch / "good", wider, {.family = "qwen2"},
          {"model.safetensors", "mlp.down_proj.weight has the shape [16, 8]", "[16, 6]"});
  refused(scratch / "good", without, {.family = "llama"}, {"the model has no place for", "k_proj.bias"});
  const HuggingFaceModel gpt{"gpt2", GptOptions{.layers = 1, .hidden = 16, .heads = 2, .vocab = 7, .positions = 16}, 16};
  refused(scratch / "good", gpt, {.family = "gpt2"},
          {"the file lacks h.0.attn.c_attn.bias", "The model has no place for model.embed_tokens"});
  refused(scratch / "good", model, {.family = "opt"}, {"'opt'", "gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe"});
  refused(scratch / "nothing", model, {}, {"nothing"});
  refused(scratch.path(), model, {}, {"there are no weights in this folder", "pytorch_model.bin"});

  Values stored = read_all(scratch / "good");
  stored["model.layers.0.self_attn.qkv_proj.weight"] = at::zeros({31, 16});
  for (const char* part : {"q", "k", "v"}) stored.erase(fmt::format("model.layers.0.self_attn.{}_proj.weight", part));
  write_torch(scratch / "fused.pt", stored);
  refused(scratch / "fused.pt", model, {}, {"qkv_proj.weight should have the 32 rows of q_proj, k_proj, v_proj", "[31, 16]"});
  write_torch(scratch / "values.pt", values_of(model, 7), {}, {{"epoch", Value::integer(3)}});
  refused(scratch / "values.pt", model, {}, {"values.pt", "expected tensors only", "'epoch' is 3"});
  refused(scratch / "values.pt", model, {.entry = "model"}, {"there is no 'model'"});
}

// Rank 0 alone writes and finds it; the others gather on, and hear of it. What was infinite before may stay so.
TEST(Weights, a_number_that_the_dtype_of_the_file_does_not_hold_is_refused) {
  const Scratch scratch;
  on_mesh(qwen2(), {1, 3, 1}, 7, [&](Sharded& sharded, int64_t) {
    at::Tensor norm = at::ones({16});
    norm[5] = -70000;
    norm[6] = std::numeric_limits<double>::infinity();
    sharded.write_parameters({{"model.layers.0.input_layernorm.weight", norm}});
    expect_error([&] { save_weights(scratch / "half", sharded, {.family = "qwen2", .dtype = Dtype::Half}); },
                 {"model.layers.0.input_layernorm.weight: 1 of its values are too large for float16, such as -70000"});
    save_weights(scratch / "bfloat", sharded, {.family = "qwen2", .dtype = Dtype::BFloat16});
  });
  EXPECT_FALSE(std::filesystem::exists(scratch / "half"));
  Values stored = read_all(scratch / "bfloat");
  stored["model.norm.weight"] = at::full({16}, 1e300, at::kDouble);
  write_torch(scratch / "double.pt", stored);
  on_mesh(qwen2(), {1, 3, 1}, 7, [&](Sharded& sharded, int64_t) {
    expect_error([&] { load_weights(scratch / "double.pt", sharded, {.family = "qwen2"}); }, {"too large for float32"});
  });
}

// torch.save keeps a transposed matrix as it lies in memory: here a [3, 2] whose columns lie end to end.
TEST(Weights, of_torch_save_are_read_by_their_strides) {
  const auto numbers = [](std::initializer_list<int64_t> values) {
    Value::Items items;
    for (const int64_t value : values) items.push_back(Value::integer(value));
    return Value::tuple(std::move(items));
  };
  const Value storage = Value::tuple({Value::string("storage"), Value::global("torch", "FloatStorage"), Value::string("0"),
                                      Value::string("cpu"), Value::integer(7)});
  const Value matrix = Value::reduced("torch._utils", "_rebuild_tensor_v2",
                                      {Value::persistent(storage), Value::integer(1), numbers({3, 2}), numbers({1, 3}),
                                       Value::boolean(false), Value::dict({})});
  const at::Tensor elements = at::arange(7, at::kFloat);
  std::string bytes;
  ZipWriter zip([&](const void* data, size_t count) { bytes.append(static_cast<const char*>(data), count); });
  zip.add("archive/data.pkl", write_pickle(Value::dict({{Value::string("w"), matrix}})));
  zip.add("archive/data/0", bytes_in(elements));
  zip.finish();
  const Scratch scratch;
  spill(scratch / "w.pt", bytes);
  const at::Tensor expected = elements.narrow(0, 1, 6).view({2, 3}).t();
  const StoredWeight weight = open_weights(system_files(), scratch / "w.pt").at("w");
  EXPECT_TRUE(kit::same_bits(read_whole(weight), expected));
  const at::Tensor part = at::empty({2, 1});
  WeightReader reader(system_files());
  reader.read(weight, {{1, 3}, {1, 2}}, part.mutable_data_ptr());
  EXPECT_TRUE(kit::same_bits(part, expected.slice(0, 1, 3).slice(1, 1, 2)));
  EXPECT_EQ(reader.bytes_read(), 8);
  EXPECT_TRUE(kit::same_bits(read_whole(weight.turned("w").rows(1, 1)), expected.t().slice(0, 1, 2)));
}

// Files of torch.save are pickles, which could ask for any function.
TEST(Weights, a_pickle_that_asks_for_more_than_tensors_is_refused_by_name) {
  const Scratch scratch;
  write_torch(scratch / "bad.pt", {{"w", at::ones({2})}}, {}, {{"x", Value::reduced("os", "system", {Value::string("true")})}});
  expect_error([&] { open_weights(system_files(), scratch / "bad.pt"); }, {"bad.pt", "os.system"});
  spill(scratch / "old.pt", std::string("\x80\x02\x8a\x0al\xfc", 6) + "..");
  expect_error([&] { open_weights(system_files(), scratch / "old.pt"); }, {"before 1.6"});
}

TEST(Weights, a_tied_model_takes_a_file_with_both_names_if_they_are_equal) {
  const Scratch scratch;
  const HuggingFaceModel tied = qwen2(/*tied=*/true);
  const Values values = values_of(tied, 7);
  write_torch(scratch / "both.pt", values);
  EXPECT_EQ(differences(tied, {1, 2, 2}, scratch / "both.pt", {.family = "qwen2"}, values), "");
  Values other = values;
  other["lm_head.weight"] = values.at("lm_head.weight") + 1;
  write_torch(scratch / "other.pt", other);
  on_mesh(tied, {1, 2, 1}, 5, [&](Sharded& sharded, int64_t) {
    expect_error([&] { load_weights(scratch / "other.pt", sharded, {}); },
                 {"other.pt", "model.embed_tokens.weight is tied", "other values"});
  });
}

TEST(Weights, what_does_not_fit_is_left_out_when_loading_is_partial) {
  const Scratch scratch;
  const HuggingFaceModel model = qwen2();
  HuggingFaceModel without = model;
  std::get<LlamaOptions>(without.options).qkv_bias = false;
  save_from(model, {}, 7, scratch / "more", {.family = "qwen2"});
  save_from(without, {}, 7, scratch / "less", {.family = "llama"});
  on_mesh(without, {1, 2, 1}, 5, [&](Sharded& sharded, int64_t) {
    const LoadedWeights loaded = load_weights(scratch / "more", sharded, {.partial = true});
    EXPECT_EQ(loaded.unused.size(), 3);
    EXPECT_TRUE(loaded.missing.empty());
  });
  on_mesh(model, {1, 2, 1}, 5, [&](Sharded& sharded, int64_t) {
    const LoadedWeights loaded = load_weights(scratch / "less", sharded, {.partial = true});
    EXPECT_EQ(loaded.missing.size(), 3);
    EXPECT_TRUE(loaded.unused.empty());
  });
}

namespace {

// Its reads fail from the one of this number on.
class UnreadableFiles : public FileSystem {
 public:
  explicit UnreadableFiles(int64_t failing) : left_(failing) {}
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    return left_-- > 0 ? FileSystem::pread(fd, data, bytes, offset) : -EIO;
  }

 private:
  int64_t left_;
};

}  // namespace

TEST(Weights, a_read_that_fails_on_one_rank_is_an_error_on_every_rank) {
  const Scratch scratch;
  save_from(qwen2(), {}, 7, scratch / "good", {.family = "qwen2"});
  for (const int64_t failing : {0, 2, 4})  // what describes them takes three reads
    on_mesh(qwen2(), {1, 3, 1}, 5, [&](Sharded& sharded, int64_t rank) {
      UnreadableFiles files(rank == 1 ? failing : 1 << 20);
      const std::string error = refusal([&] { load_weights(scratch / "good", sharded, {.family = "qwen2", .files = &files}); });
      expect_says(error, {"model.safetensors", "rank 1"});
      EXPECT_EQ(error.find("has some of the file's values") != std::string::npos, failing > 2) << failing << ": " << error;
      EXPECT_EQ(error.find("Load it again before you use it") != std::string::npos, failing > 2) << failing << ": " << error;
      load_weights(scratch / "good", sharded, {.family = "qwen2"});
      const auto found = sharded.gather_main_parameters();
      for (const auto& [name, value] : values_of(qwen2(), 7)) EXPECT_TRUE(found.at(name).equal(value)) << name;
    });
}

TEST(Weights, a_prefix_of_every_name_is_taken_off) {
  const Scratch scratch;
  Values stored;
  for (const auto& [name, value] : values_of(qwen2(), 7)) stored["module." + name] = value;
  write_torch(scratch / "of_ddp.pt", stored);
  EXPECT_EQ(differences(qwen2(), {1, 2, 1}, scratch / "of_ddp.pt", {.prefix = "module."}, values_of(qwen2(), 7)), "");
  on_mesh(qwen2(), {1, 2, 1}, 5, [&](Sharded& sharded, int64_t) {
    expect_error([&] { load_weights(scratch / "of_ddp.pt", sharded, {.prefix = "_orig_mod."}); },
                 {"of_ddp.pt", "module.lm_head.weight does not begin with the prefix '_orig_mod.'"});
  });
}

TEST(Weights, a_save_that_fails_anywhere_is_an_error_on_every_rank_and_leaves_no_folder) {
  const Scratch scratch;
  const HuggingFaceModel model = qwen2();
  const std::string folder = scratch / "weights";
  ClusterDisk counted({});
  save_from(model, {}, 7, scratch / "counted", {.family = "qwen2", .config = hugging_face_config(model), .files = &counted});
  int64_t errors = 0;
  // The last calls flush the parent of a folder that has its name already, and close it.
  for (int64_t failing = 0; failing + 3 < counted.changes(); ++failing) {
    ClusterDisk files({.fails = failing, .error = ENOSPC});
    on_mesh(model, {1, 2, 1}, 7, [&](Sharded& sharded, int64_t rank) {
      const SaveWeightsOptions options{
          .family = "qwen2", .config = hugging_face_config(model), .files = rank == 0 ? &files : &system_files()};
      const std::string error = error_of([&] { save_weights(folder, sharded, options); });
      if (rank == 1 && !error.empty()) ++errors;
    });
    if (::access(folder.c_str(), F_OK) == 0) {
      EXPECT_EQ(read_all(folder).size(), values_of(model, 7).size()) << "call " << failing;
      std::filesystem::remove_all(folder);
    }
  }
  EXPECT_GT(errors, 5);
}

}  // namespace shardproof::checkpoint
