// What plan reads: machines, models of others, meshes to choose among.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>

#include "harness/case/network.h"
#include "harness/commands/choices.h"
#include "harness/plan/search.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"

using namespace harness;
using shardproof::expect_error;
using shardproof::Mesh;

namespace {

golden::Model described(const std::string& path) {
  return described_model(shardproof::checkpoint::read_hugging_face_config(path));
}

std::string written(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
  return path;
}

int64_t parameters(const golden::Model& model) {
  int64_t sum = 0;
  for (const auto& [name, shape] : golden::parameter_shapes(model)) sum += shardproof::numel(shape);
  return sum;
}

DryRun small(const std::string& mesh = "dp_shard=4") {
  DryRun run;
  run.what.model = parse_model("gpt(layers=2,hidden=16,heads=4,vocab=24,positions=8,tied)");
  run.what.mesh = Mesh::parse(mesh);
  return run;
}

}  // namespace

TEST(PlanMachine, is_read_as_it_was_written) {
  const harness_env::Folder folder;
  for (const Machine& machine : known_machines()) {
    validate(machine);
    EXPECT_FALSE(machine.source.empty());
    write_machine(machine, folder / "machine.json");
    const Machine read = read_machine(folder / "machine.json");
    EXPECT_EQ(walk(dry_run(small()).record, read).seconds, walk(dry_run(small()).record, machine).seconds);
    EXPECT_EQ(read.memory_bytes, machine.memory_bytes);
    EXPECT_EQ(read.name, machine.name);
  }
}

TEST(PlanMachine, errors_name_the_field_the_file_and_the_machine_that_was_meant) {
  const harness_env::Folder folder;
  expect_error([] { chosen_machine("h10"); }, {"'h10'", "a100, h100, h200", "Did you mean 'h100'?"});
  expect_error([&] { read_machine(written(folder / "a.json", "{\"name\": \"mine\"}")); }, {"a.json", "flops", "--calibrate"});
  expect_error([&] { read_machine(written(folder / "b.json", "not json")); }, {"b.json", "does not describe a machine"});
  Machine machine = known_machines().front();
  machine.inside.bytes_per_second = 0;
  write_machine(machine, folder / "c.json");
  expect_error([&] { read_machine(folder / "c.json"); }, {"bytes_per_second is 0", "c.json"});
  machine = known_machines().front();
  machine.memory_bytes = 1e300;
  write_machine(machine, folder / "d.json");
  expect_error([&] { read_machine(folder / "d.json"); }, {"memory_bytes is 1e+300", "d.json"});
  machine = known_machines().front();
  write_machine(machine, folder / "e.json");
  std::ifstream file(folder / "e.json");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const std::regex field("\"ranks_per_host\": 8");
  for (const char* ranks : {"1e300", "2.5", "\"eight\"", "18446744073709551615"})
    expect_error(
        [&] {
          read_machine(
              written(folder / "f.json", std::regex_replace(text, field, fmt::format("\"ranks_per_host\": {}", ranks))));
        },
        {"ranks_per_host is ", "whole numbers", "f.json"});
  expect_error([&] { chosen_machine(folder.path()); }, {"is no file"});
}

TEST(PlanConfig, models_of_others_have_the_numbers_of_parameters_that_their_makers_say) {
  const harness_env::Folder folder;
  const auto count = [&](const std::string& text) {
    return parameters(described(written(folder / "config.json", text)));
  };
  EXPECT_EQ(count(R"({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
                      "n_positions": 1024, "n_inner": null})"),
            124'439'808);
  EXPECT_EQ(count(R"({"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
                      "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
                      "tie_word_embeddings": false})"),
            8'030'261'248);
  EXPECT_EQ(count(R"({"model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
                      "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000})"),
            7'241'732'096);
  EXPECT_EQ(count(R"({"model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14,
                      "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
                      "tie_word_embeddings": true})"),
            494'032'768);
  EXPECT_EQ(count(R"({"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16,
                      "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
                      "tie_word_embeddings": true})"),
            596'049'920);
}

TEST(PlanConfig, a_model_that_the_library_has_not_is_a_clear_error) {
  const harness_env::Folder folder;
  const auto refuse = [&](const std::string& text, std::initializer_list<std::string> parts) {
    expect_error([&] { described(written(folder / "config.json", text)); }, parts);
  };
  const std::string sizes =
      R"("num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100)";
  refuse(R"({"model_type": "bert"})", {"config.json", "'bert'", "gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe"});
  refuse("{}", {"model_type is ''"});
  refuse("[1", {"config.json", "json"});
  refuse("[1]", {"is no config.json"});
  refuse(R"({"model_type": "llama", "hidden_size": 64})", {"config.json", "num_hidden_layers"});
  refuse(R"({"model_type": "llama", "attention_bias": true, )" + sizes + "}", {"biases"});
  refuse(R"({"model_type": "llama", "head_dim": 0, )" + sizes + "}", {"head_dim"});
  refuse(R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_inner": 24})", {"24 wide"});
  expect_error([&] { described(folder / "nothing.json"); }, {"nothing.json"});
}

TEST(PlanSearch, deals_out_all_ranks_in_every_way_once) {
  const Machine machine = chosen_machine("h100");
  for (const int64_t ranks : {1, 6, 16, 16384}) {
    std::set<std::string> seen;
    for (const Choice& choice : choices_for(ranks, machine)) {
      EXPECT_EQ(choice.mesh.size(), ranks);
      EXPECT_TRUE(seen.insert(choice.strategy + choice.mesh.str()).second) << choice.mesh.str();
      EXPECT_TRUE(!choice.mesh.has("tp") || choice.mesh.size("tp") <= machine.ranks_per_host);
    }
  }
  // tp 1, 2, 4 and 8 leave 16, 8, 4 and 2 ranks, which make 3, 2, 1 and no ways of replicas.
  EXPECT_EQ(choices_for(16, machine).size(), 4U * 3 + 2U * (3 + 2 + 1));
}

TEST(PlanSearch, those_that_fit_come_first_and_the_fastest_of_them_before_the_others) {
  const Machine machine = chosen_machine("h100");
  std::vector<int64_t> peaks;
  const auto nothing = [](size_t, size_t, const Choice&) {};
  for (const Found& found : search(small(), {8, 1e12}, machine, nothing).found) peaks.push_back(found.peak_bytes);
  std::ranges::sort(peaks);
  ASSERT_GT(peaks.size(), 4U);
  const int64_t half = peaks[peaks.size() / 2];
  const SearchResult result = search(small(), {8, static_cast<double>(half)}, machine, nothing);
  EXPECT_FALSE(result.found.back().fits);
  EXPECT_TRUE(result.found.front().fits);
  for (size_t i = 0; i < result.found.size(); ++i) {
    const Found& found = result.found[i];
    EXPECT_EQ(found.fits, found.peak_bytes <= half) << found.choice.mesh.str();
    DryRun run = small(found.choice.mesh.str());
    run.what.strategy = found.choice.strategy;
    EXPECT_EQ(found.time.seconds, walk(dry_run(run).record, machine).seconds) << found.choice.mesh.str();
    if (i == 0) continue;
    const Found& before = result.found[i - 1];
    EXPECT_TRUE(before.fits || !found.fits);
    if (before.fits && found.fits) {
      EXPECT_GE(before.tokens_per_second, found.tokens_per_second);
    }
    if (!before.fits && !found.fits) {
      EXPECT_LE(before.peak_bytes, found.peak_bytes);
    }
  }
  // Four heads leave none for some of eight ranks along tp.
  ASSERT_EQ(result.refused.size(), 1U);
  EXPECT_NE(result.refused.front().find("4 heads"), std::string::npos);
}
