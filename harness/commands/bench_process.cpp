#include "harness/commands/bench_process.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "shardproof/base/check.h"

namespace harness {

using nlohmann::json;

json run_process(const std::string& command, const std::string& contestant) {
  FILE* pipe = popen(command.c_str(), "r");
  SHARD_REQUIRE(pipe, "bench", "cannot start {}", command);
  std::string output;
  std::array<char, 65536> buffer;
  while (const size_t count = fread(buffer.data(), 1, buffer.size(), pipe)) output.append(buffer.data(), count);
  const int status = pclose(pipe);
  const size_t begin = output.find('{');
  SHARD_REQUIRE(status == 0 && begin != std::string::npos, "bench", "{} did not finish (status {}). Run it alone: {}",
                contestant, status, command);
  return json::parse(output.substr(begin, output.find('\n', begin) - begin));
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

json model_spec(const bench::Size& size) {
  return {{"layers", size.layers}, {"hidden", size.hidden}, {"heads", size.heads},
          {"vocab", size.vocab},   {"seq", size.seq},       {"batch", size.batch}};
}

}  // namespace harness
